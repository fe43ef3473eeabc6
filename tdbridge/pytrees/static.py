"""The hashable half of a node in a pytree: all but its children, free of shapes and devices.

Each child carries how many of its LAST dimensions are event dimensions; the batch size is what
is left of its shape. So it stays right when vmap or scan take a leading dimension away and when
stacking adds one, and the definition of a tree does not depend on its leaves.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

from tensordict import TensorDict

from tdbridge._compat.tensordict import tensordict_of
from tdbridge.layout.constants import Constant
from tdbridge.layout.tree import Node, is_node

Names = tuple[str | None, ...]
Size = tuple[int, ...]


@dataclass(frozen=True)
class NodeDef:
    """One node of a tree definition.

    Attributes:
        keys: of the children, sorted.
        event_dims: per child, its dimensions beyond the batch.
        followers: the positions of the nested trees that have no leaf at all: with nothing to
            derive a batch size from, they follow their parent's.
        cls: the torch-side class.
        names: a name or None per batch dimension, or None when no dimension has one.
        constants: the non-tensor entries, sorted by key.
        batch_size: kept only where there is no leaf to tell it.
    """

    keys: tuple[str, ...] = ()
    event_dims: tuple[int, ...] = ()
    followers: tuple[int, ...] = ()
    cls: type = TensorDict
    names: Names | None = None
    constants: tuple[tuple[str, Constant], ...] = ()
    batch_size: Size | None = None

    @cached_property
    def _hash(self) -> int:
        shape = (self.keys, self.event_dims, self.followers, self.batch_size)
        return hash((shape, self.cls, self.names, self.constants))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def index(self) -> dict[str, int]:
        """The position of each key among the children."""
        return {key: i for i, key in enumerate(self.keys)}

    @cached_property
    def values(self) -> dict[str, Any]:
        """The non-tensor entries."""
        return {key: constant.value for key, constant in self.constants}

    def names_for(self, batch_dims: int) -> Names | None:
        """The names, or None while a transformation has changed the number of batch dimensions."""
        return self.names if self.names is not None and len(self.names) == batch_dims else None

    def resized(self, batch_size: Size | None, names: Names | None) -> "NodeDef":
        """The same node with other names and, where no leaf tells it, another batch size."""
        stored = None if self.batch_size is None else batch_size
        return replace(self, names=names, batch_size=stored)


def define(node: Node) -> tuple[NodeDef, tuple[Any, ...]]:
    """The definition of one level of a tree, and its children in the order of the keys."""
    items = sorted(node.children, key=lambda item: item[0])
    children = tuple([value for _, value in items])
    keys = tuple([sys.intern(key) for key, _ in items])
    like = NodeDef(
        cls=node.cls, names=node.names, constants=node.constants, batch_size=node.batch_size
    )
    return with_children(like, keys, children, len(node.batch_size)), children


def with_children(
    like: NodeDef, keys: tuple[str, ...], children: Sequence[Any], batch_dims: int
) -> NodeDef:
    """`like` over these children. `like.batch_size` is dropped if one of them tells it."""
    event_dims = tuple([max(len(shape_of(child)) - batch_dims, 0) for child in children])
    followers = tuple(
        i for i, child in enumerate(children) if is_node(child) and is_leafless(child)
    )
    stored = like.batch_size if len(followers) == len(children) else None
    return NodeDef(keys, event_dims, followers, like.cls, like.names, like.constants, stored)


def shape_of(child: Any) -> Size:
    """The shape of a leaf or the batch size of a nested tree; `()` for what has none.

    Masks, None, shardings and PartitionSpecs stand in the place of leaves too.
    """
    shape = getattr(child, "shape", ())
    return shape if isinstance(shape, tuple) else ()


def is_leafless(tree: Any) -> bool:
    """Whether a nested tree has not a single leaf below it."""
    definition = getattr(tree, "_definition", None)
    if definition is not None:
        return definition.batch_size is not None
    return all(is_node(child) and is_leafless(child) for child in tensordict_of(tree).values())


def derive_batch_size(definition: NodeDef, children: Iterable[Any]) -> Size | None:
    """The batch size that the shapes of the children tell.

    Children that have no shape say nothing, and where none has one (a tree of masks) the answer is
    None. Where the others disagree, as after mapping one leaf to another rank, it is the leading
    dimensions that all of them share.
    """
    sizes = set()
    for i, (child, dims) in enumerate(zip(children, definition.event_dims, strict=True)):
        shape = getattr(child, "shape", None)
        if isinstance(shape, tuple) and i not in definition.followers:
            sizes.add(tuple(shape[: max(len(shape) - dims, 0)]))
    if not sizes:
        return definition.batch_size
    if len(sizes) == 1:
        return sizes.pop()
    columns = zip(*sizes, strict=False)
    return tuple(dims[0] for dims in takewhile(lambda dims: len(set(dims)) == 1, columns))


def sized_followers(
    definition: NodeDef,
    children: Sequence[Any],
    size: Size,
    resize: Callable[[Any, Size], Any],
) -> Sequence[Any]:
    """The children, those without leaves with the batch size `size` and their own last dimensions.

    With `size=()` they are left with their own dimensions alone. That is how a node hands them
    out when it is flattened, so that the definition of the tree does not depend on its batch.
    """
    if not definition.followers:
        return children
    sized = list(children)
    for i in definition.followers:
        if is_node(sized[i]):
            old, own = tuple(sized[i].shape), definition.event_dims[i]
            new = (*size, *old[len(old) - own :])
            sized[i] = sized[i] if new == old else resize(sized[i], new)
    return sized
