"""What is known of a consolidated tree without a walk over its leaves.

`consolidate` leaves it beside stock's own record, which goes as soon as the tree is unlocked and
is marked as stale when a non-tensor entry is written to. While it is there, the tree has the leaves
that it had. What can change under a lock are batch sizes and names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from tdbridge._compat import tensordict as compat
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.plan import Plan, of_class, with_own_constants
from tdbridge.layout.spec import Layout, Path
from tdbridge.layout.tree import BUILDERS, Node, walk_nodes


@dataclass(frozen=True)
class Placement:
    """Where the leaves of a consolidated tree are.

    Attributes:
        plan: the plan of the tree, its layout that of the buffer.
        constants: the non-tensor values of each node.
        storage: the buffer.
        leaves: the leaves of the tree, in the order of the layout.
    """

    plan: Plan
    constants: tuple[tuple[Path, Any], ...]
    storage: Tensor
    leaves: Sequence[Tensor]

    @property
    def layout(self) -> Layout:
        """The layout of the buffer, without non-tensor values."""
        return self.plan.layout

    @property
    def whole(self) -> Layout:
        """The layout with the non-tensor values."""
        return with_own_constants(self.layout, self.constants)

    @cached_property
    def segments(self) -> list[Tensor]:
        """The buffer as one flat tensor per dtype."""
        return segments_of(self.layout, self.storage)

    @cached_property
    def _addresses(self) -> list[int]:
        return addresses_in(self.layout, self.storage.data_ptr())

    @property
    def holds(self) -> bool:
        """Whether the leaves still lie there: `tensor.data = ...` moves one under any lock."""
        return list(map(Tensor.data_ptr, self.leaves)) == self._addresses


def segments_of(layout: Layout, storage: Tensor) -> list[Tensor]:
    """Each segment as ONE flat tensor of its dtype; the memory of `storage` is shared."""
    return [storage[s.offset : s.stop].view(dtype_of(s.dtype).in_torch) for s in layout.segments]


def addresses_in(layout: Layout, base: int) -> list[int]:
    """Where each leaf starts in a buffer that starts at `base`; 0, as torch has it, if empty."""
    return [base + leaf.offset if leaf.numel else 0 for leaf in layout.leaves]


_KEY = "tdbridge"


def remember(td: Any, tree: Node, placement: Placement) -> None:
    """Keeps the placement of `td`, which was consolidated and locked just now, for `placement_of`.

    Args:
        td: the consolidated tree.
        tree: a description of it, or of the one that it was made from.
        placement: where its leaves are.
    """
    nodes, slot = list(walk_nodes(tree)), compat.consolidated_slot(td)
    if slot is not None and not any(node.cls in BUILDERS for _, node in nodes):
        # The root itself would keep itself alive.
        below = [td.get(path) for path, _ in nodes[1:]]
        slot[_KEY] = placement, _state(td), [(node, _state(node)) for node in below]


def placement_of(td: Any) -> Placement | None:
    """What `remember` keeps of `td`, or None: nothing is known, or the tree changed."""
    slot = compat.consolidated_slot(td)
    placement, root, below = (slot or {}).get(_KEY, (None, None, ()))
    if placement is None or root != _state(td) or any(_state(n) != state for n, state in below):
        return None
    cls = type(td)
    if placement.plan.skeleton[0] is cls:
        return placement
    # A tensorclass and the TensorDict in it have one record.
    return replace(placement, plan=of_class(placement.plan, cls))


def _state(node: Any) -> tuple[Any, Any]:
    return node.batch_size, node.names
