"""The hashable half of a node in a pytree: all but its children, free of shapes and devices.

Each child carries how many of its LAST dimensions are event dimensions; the batch size is what
is left of its shape. So it stays right when vmap or scan take a leading dimension away and when
stacking adds one, and the definition of a tree does not depend on its leaves.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any

from tensordict import TensorDict, is_non_tensor

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

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what is cached: a hash holds in one process alone.
        return NodeDef, tuple([getattr(self, field.name) for field in fields(self)])

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
    batch_dims = len(node.batch_size)
    nested = [tree for _, tree in node.nested]
    dims = [*_ndims(node.leaves), *(len(tree.shape) for tree in nested)]
    leafless = [False] * len(node.leaves) + [is_leafless(tree) for tree in nested]
    keys, order = _sorted((*node.keys, *(key for key, _ in node.nested)))
    children = (*node.leaves, *nested)
    definition = NodeDef(
        keys=keys,
        event_dims=tuple([max(dims[i] - batch_dims, 0) for i in order]),
        followers=tuple([at for at, i in enumerate(order) if leafless[i]]) if nested else (),
        cls=node.cls,
        names=node.names,
        constants=node.constants,
        batch_size=node.batch_size if all(leafless) else None,
    )
    return definition, tuple([children[i] for i in order])


def _ndims(leaves: Sequence[Any]) -> list[int]:
    """Masks, None, shardings and PartitionSpecs stand in the place of leaves too: 0."""
    try:
        return [leaf.ndim for leaf in leaves]
    except AttributeError:
        shapes = (getattr(leaf, "shape", ()) for leaf in leaves)
        return [len(shape) if isinstance(shape, tuple) else 0 for shape in shapes]


@lru_cache(maxsize=1024)
def _sorted(keys: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The keys in order, and the place that each has in `keys`."""
    order = tuple(sorted(range(len(keys)), key=keys.__getitem__))
    return tuple([sys.intern(keys[i]) for i in order]), order


def is_leafless(tree: Any) -> bool:
    """Whether a nested tree has not a single leaf below it."""
    definition = getattr(tree, "_definition", None)
    if definition is not None:
        return definition.batch_size is not None
    return all(
        is_non_tensor(child) or (is_node(child) and is_leafless(child))
        for child in tensordict_of(tree).values()
    )


def shapes_of(definition: NodeDef, children: Iterable[Any]) -> set[tuple[Size, int]]:
    """The different shapes of the children, each with how many of its dimensions are of the event.

    Children that have no shape (masks, None) and those without leaves have no say.
    """
    shapes: list[Any] = [getattr(child, "shape", None) for child in children]
    for i in definition.followers:
        shapes[i] = None
    pairs = zip(shapes, definition.event_dims, strict=True)
    return {pair for pair in pairs if isinstance(pair[0], tuple)}


def derive_batch_size(definition: NodeDef, children: Iterable[Any]) -> Size | None:
    """The batch size that the shapes of the children tell, or None where none has one."""
    return common_size(definition, shapes_of(definition, children))


def common_size(definition: NodeDef, shapes: set[tuple[Size, int]]) -> Size | None:
    """What is left of the shapes without the event dimensions.

    Where they disagree, as after mapping one leaf to another rank, it is the leading dimensions
    that all of them share.
    """
    sizes = {shape[: max(len(shape) - dims, 0)] for shape, dims in shapes}
    if not sizes:
        return definition.batch_size
    if len(sizes) == 1:
        return tuple(sizes.pop())
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
