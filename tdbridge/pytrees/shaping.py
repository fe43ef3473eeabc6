"""Operations on the batch dimensions of one or more ArrayDicts: index, reshape, stack, cat.

All are one recursion, `combine`: what to do to the leaves, to a stored batch size, to the names.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tdbridge.errors import LeafTypeError, NarrowingError
from tdbridge.layout.classes import stands_apart
from tdbridge.layout.constants import Constant
from tdbridge.layout.non_tensors import PerElement, elements_of, is_per_element
from tdbridge.pytrees.entries import is_nested
from tdbridge.pytrees.indexing import indexed, indexed_names, indexed_size, steps_of
from tdbridge.pytrees.static import Names, NodeDef, Size

Constants = tuple[tuple[str, Constant], ...]


def combine(
    trees: Sequence[Any],
    on_leaves: Callable[..., Any],
    on_sizes: Callable[..., Size],
    on_names: Callable[[Names], Names],
) -> Any:
    """Joins ArrayDicts of one structure, level by level.

    Class and names are those of the first. Non-tensor values per element are joined as leaves are;
    other non-tensor entries have to be equal.

    Raises:
        ValueError: the structures differ; the error says in what.
    """
    first = trees[0]
    definition: NodeDef = first._definition
    _refuse_apart(definition.cls)
    for other in trees[1:]:
        _check_same(first, other)
    groups = list(zip(*(tree._children for tree in trees), strict=True))
    children = [
        combine(group, on_leaves, on_sizes, on_names)
        if is_nested(group[0])
        else _only(key, group)
        if dims is None
        else on_leaves(*group)
        for key, dims, group in zip(definition.keys, definition.event_dims, groups, strict=True)
    ]
    names = on_names(definition.names_for(first.batch_dims) or (None,) * first.batch_dims)
    stored = None
    if definition.batch_size is not None:
        stored = on_sizes(*(tree._definition.batch_size for tree in trees))
    new = definition.resized(stored, names if any(name is not None for name in names) else None)
    return first._make(replace(new, constants=_constants(trees, on_leaves)), children)


def _refuse_apart(cls: type) -> None:
    if stands_apart(cls):
        raise ValueError(
            f"got a {cls.__name__}, whose parts have no batch dimensions in common: index or stack "
            "its parts, or make the leaf dense in torch first."
        )


def _constants(trees: Sequence[Any], on_leaves: Callable[..., Any]) -> Constants:
    """The non-tensor entries of `trees`, joined.

    Raises:
        ValueError: an entry that is one value differs between the trees.
        IndexError: values per element are indexed by what only a compiled program knows.
    """
    definitions: list[NodeDef] = [tree._definition for tree in trees]
    if not any(definition.constants for definition in definitions):
        return ()
    pairs = [(tree._definition.values, tree.batch_size) for tree in trees]
    each = {k for values, size in pairs for k, v in values.items() if is_per_element(v, size)}
    first = definitions[0]
    for other in definitions[1:]:
        if _parted(other, each) != _parted(first, each):
            raise ValueError(
                f"non-tensor entries differ: {first.values}, {other.values}. Exclude them, or make "
                "them equal."
            )
    return tuple([
        (key, _per_element(key, [(values[key], size) for values, size in pairs], on_leaves))
        if key in each
        else (key, constant)
        for key, constant in first.constants
    ])  # fmt: skip


def _parted(definition: NodeDef, each: set[str]) -> list[tuple[str, Constant | None]]:
    """The non-tensor entries, without the values of those in `each`."""
    return [(key, None if key in each else constant) for key, constant in definition.constants]


def _per_element(key: str, pairs: Sequence[tuple[Any, Size]], on_leaves: Any) -> Constant:
    """Values per element, joined as leaves are; one value that is left is no list of them."""
    try:
        new = on_leaves(*[elements_of(value, size) for value, size in pairs])
    except (jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError):
        raise IndexError(
            f"{key!r} has a non-tensor value per element, which no traced index can choose from: "
            f"index outside of jit, or exclude({key!r}) first."
        ) from None
    return Constant(PerElement(new) if new.ndim else new[()])


def _only(key: str, leaves: Sequence[Any]) -> Any:
    """The one value of an unbatched leaf, which no operation on the batch changes.

    Raises:
        ValueError: the trees have different ones.
    """
    first = leaves[0]
    if any(leaf is not first and not _equal(leaf, first) for leaf in leaves[1:]):
        raise ValueError(
            f"{key!r} is not batched and differs between the trees, or may while JAX traces: "
            f"exclude({key!r}), or take it from one tree for all."
        )
    return first


def _equal(a: Any, b: Any) -> bool:
    concrete = not any(isinstance(leaf, Tracer) for leaf in (a, b))
    alike = concrete and (a.dtype, a.shape) == (b.dtype, b.shape)
    return alike and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _check_same(first: Any, other: Any) -> None:
    a, b = first._definition, other._definition
    for what in ("keys", "cls", "event_dims"):
        if getattr(a, what) != getattr(b, what):
            raise ValueError(f"structures differ in {what}: {getattr(a, what)}, {getattr(b, what)}")
    for key, left, right in zip(a.keys, first._children, other._children, strict=True):
        if is_nested(left) != is_nested(right):
            raise ValueError(f"structures differ: {key!r} is a leaf in one and a tree in another.")


def index(tree: Any, item: Any) -> Any:
    """`tree[item]` over the batch dimensions."""
    _refuse_apart(tree.tensorclass)  # before the index is found too long for what they share
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
