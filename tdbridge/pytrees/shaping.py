"""Operations on the batch dimensions of one or more ArrayDicts: index, reshape, stack, cat.

All are one recursion, `combine`: what to do to the leaves, to a stored batch size, to the names.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tdbridge.pytrees.indexing import batch_index, indexed_names, indexed_size
from tdbridge.pytrees.static import Names, NodeDef, Size


def combine(
    trees: Sequence[Any],
    on_leaves: Callable[..., Any],
    on_sizes: Callable[..., Size],
    on_names: Callable[[Names], Names | None],
) -> Any:
    """Joins ArrayDicts of one structure, level by level.

    Class, names and non-tensor entries are those of the first.

    Raises:
        ValueError: the structures differ; the error says in what.
    """
    first = trees[0]
    definition: NodeDef = first._definition
    for other in trees[1:]:
        _check_same(definition, other._definition)
    children = [
        combine(group, on_leaves, on_sizes, on_names)
        if isinstance(group[0], type(first))
        else on_leaves(*group)
        for group in zip(*(tree._children for tree in trees), strict=True)
    ]
    names = definition.names_for(first.batch_dims)
    stored = None
    if definition.batch_size is not None:
        stored = on_sizes(*(tree._definition.batch_size for tree in trees))
    new = definition.resized(stored, None if names is None else on_names(names))
    return first._make(new, children)


def _check_same(a: NodeDef, b: NodeDef) -> None:
    for what in ("keys", "cls", "event_dims"):
        if getattr(a, what) != getattr(b, what):
            raise ValueError(f"structures differ in {what}: {getattr(a, what)}, {getattr(b, what)}")
    if a.constants != b.constants:
        raise ValueError(
            f"non-tensor entries differ: {a.values}, {b.values}. Exclude them, or make them equal."
        )


def index(tree: Any, item: Any) -> Any:
    """`tree[item]` over the batch dimensions."""
    items = batch_index(item, tree.batch_size)
    return combine(
        [tree],
        lambda leaf: leaf[items],
        lambda size: indexed_size(items, size),
        lambda names: indexed_names(items, names),
    )


def reshape(tree: Any, shape: Sequence[int]) -> Any:
    """The batch dimensions as `shape`; one size may be -1."""
    dims = tree.batch_dims
    size = np.broadcast_to(np.int8(0), tree.batch_size).reshape(shape).shape
    return combine(
        [tree],
        lambda leaf: leaf.reshape(*size, *leaf.shape[dims:]),
        lambda old: (*size, *old[dims:]),
        lambda _: None,
    )


def stack(trees: Sequence[Any], dim: int) -> Any:
    """Along a new batch dimension `dim`."""
    sizes = {tree.batch_size for tree in trees}
    if len(sizes) != 1:
        raise ValueError(f"stack needs trees of one batch size, got {sorted(sizes)}.")
    at = _axis(dim, len(sizes.pop()) + 1)
    return combine(
        trees,
        lambda *leaves: jnp.stack(leaves, at),
        lambda *old: (*old[0][:at], len(old), *old[0][at:]),
        lambda names: (*names[:at], None, *names[at:]),
    )


def cat(trees: Sequence[Any], dim: int) -> Any:
    """Along the existing batch dimension `dim`."""
    if not trees:
        raise ValueError("cat needs at least one tree, got none.")
    at = _axis(dim, trees[0].batch_dims)
    return combine(
        trees,
        lambda *leaves: jnp.concatenate(leaves, at),
        lambda *old: (*old[0][:at], sum(size[at] for size in old), *old[0][at + 1 :]),
        lambda names: names,
    )


def _axis(dim: int, dims: int) -> int:
    if not -dims <= dim < dims:
        raise ValueError(f"got dim {dim}, which is no batch dimension: there are {dims} to choose.")
    return dim % dims
