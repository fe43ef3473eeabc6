"""Operations on the batch dimensions of one or more ArrayDicts: index, reshape, stack, cat.

All are one recursion, `combine`: what to do to the leaves, to a stored batch size, to the names.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tdbridge.errors import LeafTypeError, NarrowingError
from tdbridge.pytrees.entries import is_nested
from tdbridge.pytrees.indexing import indexed, indexed_names, indexed_size, steps_of
from tdbridge.pytrees.static import Names, NodeDef, Size


def combine(
    trees: Sequence[Any],
    on_leaves: Callable[..., Any],
    on_sizes: Callable[..., Size],
    on_names: Callable[[Names], Names],
) -> Any:
    """Joins ArrayDicts of one structure, level by level.

    Class, names and non-tensor entries are those of the first.

    Raises:
        ValueError: the structures differ; the error says in what.
    """
    first = trees[0]
    definition: NodeDef = first._definition
    for other in trees[1:]:
        _check_same(first, other)
    children = [
        combine(group, on_leaves, on_sizes, on_names) if is_nested(group[0]) else on_leaves(*group)
        for group in zip(*(tree._children for tree in trees), strict=True)
    ]
    names = on_names(definition.names_for(first.batch_dims) or (None,) * first.batch_dims)
    stored = None
    if definition.batch_size is not None:
        stored = on_sizes(*(tree._definition.batch_size for tree in trees))
    new = definition.resized(stored, names if any(name is not None for name in names) else None)
    return first._make(new, children)


def _check_same(first: Any, other: Any) -> None:
    a, b = first._definition, other._definition
    for what in ("keys", "cls", "event_dims"):
        if getattr(a, what) != getattr(b, what):
            raise ValueError(f"structures differ in {what}: {getattr(a, what)}, {getattr(b, what)}")
    if a.constants != b.constants:
        raise ValueError(
            f"non-tensor entries differ: {a.values}, {b.values}. Exclude them, or make them equal."
        )
    for key, left, right in zip(a.keys, first._children, other._children, strict=True):
        if is_nested(left) != is_nested(right):
            raise ValueError(f"structures differ: {key!r} is a leaf in one and a tree in another.")


def index(tree: Any, item: Any) -> Any:
    """`tree[item]` over the batch dimensions."""
    steps = steps_of(item, tree.batch_size)
    return combine(
        [tree],
        lambda leaf: indexed(leaf, steps),
        lambda size: indexed_size(steps, size),
        lambda names: indexed_names(steps, names),
    )


def reshape(tree: Any, shape: Sequence[int]) -> Any:
    """The batch dimensions as `shape`; one size may be -1."""
    dims = tree.batch_dims
    size = np.broadcast_to(np.int8(0), tree.batch_size).reshape(shape).shape
    if size == tree.batch_size:
        return tree
    return combine(
        [tree],
        lambda leaf: leaf.reshape(*size, *leaf.shape[dims:]),
        lambda old: (*size, *old[dims:]),
        lambda names: (*(None,) * len(size), *names[dims:]),
    )


def stack(given: Iterable[Any], dim: int) -> Any:
    """Along a new batch dimension `dim`."""
    trees = _checked(given, "stack")
    sizes = {tree.batch_size for tree in trees}
    if len(sizes) != 1:
        raise ValueError(f"stack needs trees of one batch size, got {sorted(sizes)}.")
    at = _axis(dim, len(sizes.pop()) + 1)
    return combine(
        trees,
        lambda *leaves: numpy_for(leaves).stack(leaves, at),
        lambda *old: (*old[0][:at], len(old), *old[0][at:]),
        lambda names: (*names[:at], None, *names[at:]),
    )


def cat(given: Iterable[Any], dim: int) -> Any:
    """Along the existing batch dimension `dim`."""
    trees = _checked(given, "cat")
    at = _axis(dim, trees[0].batch_dims)
    sizes = {tree.batch_size for tree in trees}
    if len({(size[:at], size[at + 1 :]) for size in sizes}) != 1:
        raise ValueError(f"cat needs trees that differ in batch dim {at} alone, got {sizes}.")
    return combine(
        trees,
        lambda *leaves: numpy_for(leaves).concatenate(leaves, at),
        lambda *old: (*old[0][:at], sum(size[at] for size in old), *old[0][at + 1 :]),
        lambda names: names,
    )


def _checked(trees: Iterable[Any], what: str) -> list[Any]:
    found = list(trees)
    if not found:
        raise ValueError(f"{what} needs at least one tree, got none.")
    for tree in found:
        if not is_nested(tree):
            raise LeafTypeError(f"expected ArrayDicts, got a {type(tree).__name__}.")
    return found


def numpy_for(leaves: Sequence[Any]) -> Any:
    """The numpy for these leaves: with that of JAX, 64 bits would not stay 64 bits.

    Raises:
        NarrowingError: numpy leaves of 64 bits stand beside jax arrays, while x64 is off.
    """
    plain = [leaf for leaf in leaves if isinstance(leaf, (np.ndarray, np.generic))]
    if len(plain) == len(leaves):
        return np
    for leaf in plain:
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise NarrowingError(
                f"got a numpy leaf of {leaf.dtype} beside a jax array: JAX would narrow it. "
                "Convert it with tdbridge.to_jax first, or turn x64 on."
            )
    return jnp


def _axis(dim: int, dims: int) -> int:
    if not -dims <= dim < dims:
        raise ValueError(f"got dim {dim}, which is no batch dimension: there are {dims} to choose.")
    return dim % dims
