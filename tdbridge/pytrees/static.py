"""The hashable half of a node in a pytree: all but its children, free of shapes and devices.

Each child carries how many of its LAST dimensions are event dimensions; the batch size is what
is left of its shape. So it stays right when vmap or scan take a leading dimension away and when
stacking adds one, and the definition of a tree does not depend on its leaves. A child that stands
apart from the batch (an unbatched leaf, a lazy stack, a jagged tensor) carries None.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from operator import attrgetter, itemgetter
from typing import Any

from tensordict import TensorDict, UnbatchedTensor, is_non_tensor

from tdbridge._compat.tensordict import tensordict_of
from tdbridge.layout.classes import stands_apart
from tdbridge.layout.constants import Constant
from tdbridge.layout.kinds import common_prefix
from tdbridge.layout.tree import Node, is_node

_aval = attrgetter("aval")

Names = tuple[str | None, ...]
Size = tuple[int, ...]


@dataclass(frozen=True)
class NodeDef:
    """One node of a tree definition.

    Attributes:
        keys: of the children, sorted.
        event_dims: per child, its dimensions beyond the batch; None where it has no part in the
            batch.
        followers: the positions of the nested trees that have no leaf at all: with nothing to
            derive a batch size from, they follow their parent's.
        cls: the torch-side class.
        names: a name or None per batch dimension, or None when no dimension has one.
        constants: the non-tensor entries, sorted by key.
        batch_size: kept only where no child tells it.
    """

    keys: tuple[str, ...] = ()
    event_dims: tuple[int | None, ...] = ()
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

    @cached_property
    def one_rank(self) -> int | None:
        """The number of event dimensions that all children have, or None."""
        ranks = set(self.event_dims)
        return ranks.pop() if len(ranks) == 1 else None

    @cached_property
    def unbatched(self) -> frozenset[str]:
        """The keys of the children that have no part in the batch."""
        pairs = zip(self.keys, self.event_dims, strict=True)
        return frozenset([key for key, dims in pairs if dims is None])

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
    dims: list[Any] = [n - batch_dims if n > batch_dims else 0 for n in _ndims(node.leaves)]
    for i, key in enumerate(node.keys if node.unbatched else ()):
        dims[i] = None if key in node.unbatched else dims[i]
    dims += [None if is_apart(t) else max(len(t.shape) - batch_dims, 0) for t in nested]
    keys, order, pick = _sorted((*node.keys, *(key for key, _ in node.nested)))
    trees = [at for at, i in enumerate(order) if i >= len(node.keys)] if nested else ()
    children = pick((*node.leaves, *nested))
    like = NodeDef((), (), (), node.cls, node.names, node.constants, node.batch_size)
    return make_definition(keys, pick(dims), children, trees, like), children


def make_definition(
    keys: tuple[str, ...],
    event_dims: tuple[int | None, ...],
    children: Sequence[Any],
    trees: Iterable[int],
    like: NodeDef,
) -> NodeDef:
    """The definition of a node over `children`, its class, names and constants those of `like`.

    Its batch size is that of `like` where no child tells it. `trees` are the positions of the
    nested trees among the children.
    """
    batched = [i for i in trees if event_dims[i] is not None]
    followers = tuple([i for i in batched if is_leafless(children[i])])
    silent = len(followers) + event_dims.count(None) == len(keys)
    size = (like.batch_size or ()) if silent else None
    return NodeDef(keys, event_dims, followers, like.cls, like.names, like.constants, size)


def _ndims(leaves: Sequence[Any]) -> list[int]:
    """Masks, None, shardings and PartitionSpecs stand in the place of leaves too: 0."""
    with suppress(AttributeError, ValueError):  # arrays of JAX alone, and all of one rank
        (ndim,) = {len(aval.shape) for aval in {*map(_aval, leaves)}}
        return [ndim] * len(leaves)
    try:
        return [leaf.ndim for leaf in leaves]
    except AttributeError:
        shapes = (getattr(leaf, "shape", ()) for leaf in leaves)
        return [len(shape) if isinstance(shape, tuple) else 0 for shape in shapes]


Pick = Callable[[Sequence[Any]], tuple[Any, ...]]


@lru_cache(maxsize=1024)
def _sorted(keys: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...], Pick]:
    """The keys in order, the place of each in `keys`, and what brings others in that order."""
    order = tuple(sorted(range(len(keys)), key=keys.__getitem__))
    # Of one place, `itemgetter` would give the item and no tuple.
    pick = itemgetter(*order) if len(order) > 1 else tuple
    return tuple([sys.intern(keys[i]) for i in order]), order, pick


def is_apart(tree: Any) -> bool:
    """Whether a nested tree has no part in the batch of its parent."""
    definition = getattr(tree, "_definition", None)
    return stands_apart(definition.cls if definition is not None else type(tensordict_of(tree)))


def is_leafless(tree: Any) -> bool:
    """Whether a nested tree has not a single leaf below it that tells its batch size."""
    definition = getattr(tree, "_definition", None)
    if definition is not None:
        return definition.batch_size is not None
    return all(
        is_non_tensor(child)
        or isinstance(child, UnbatchedTensor)
        or (is_node(child) and (is_apart(child) or is_leafless(child)))
        for child in tensordict_of(tree).values()
    )


def shapes_of(definition: NodeDef, children: Iterable[Any]) -> set[tuple[Size, int]]:
    """The different shapes of the children, each with how many of its dimensions are of the event.

    Children that have no shape (masks, None), those without leaves and those that stand apart from
    the batch have no say.
    """
    children = tuple(children)
    if (dims := definition.one_rank) is not None:
        with suppress(AttributeError):  # arrays of JAX alone: thousands of them have a few shapes
            return {(aval.shape, dims) for aval in {*map(_aval, children)}}
    shapes: list[Any] = [getattr(child, "shape", None) for child in children]
    for i in definition.followers:
        shapes[i] = None
    pairs = set(zip(shapes, definition.event_dims, strict=True))
    return {(s, dims) for s, dims in pairs if isinstance(s, tuple) and dims is not None}


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
    return common_prefix(list(sizes))


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
            old, own = tuple(sized[i].shape), definition.event_dims[i] or 0
            new = (*size, *old[len(old) - own :])
            sized[i] = sized[i] if new == old else resize(sized[i], new)
    return sized
