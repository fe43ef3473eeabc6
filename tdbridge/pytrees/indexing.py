"""Indexing over the batch dimensions, with the results of stock TensorDict: values, sizes, names.

torch takes integers for a selection, numpy and JAX for index arrays of no dimension, so that
`x[0, :, [1, 0]]` has another shape there. Hence two steps: integers, slices and None first, then
what is an array. With arrays alone all three agree.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

Index = tuple[Any, ...]
Names = tuple[str | None, ...]
_ALL = slice(None)


def steps_of(index: Any, batch_size: tuple[int, ...]) -> tuple[Index, Index]:
    """The two indices, basic and of arrays, that one after the other do what `index` does.

    An ellipsis stands for the batch dimensions that are left, never for event dimensions.

    Raises:
        IndexError: it has more indices than there are batch dimensions, an integer is out of
            range (JAX itself would clamp it; one that jit does not know it still clamps), a mask
            is of another shape, there is more than one ellipsis, or it is no index at all.
    """
    items = [_parsed(item) for item in (index if isinstance(index, tuple) else (index,))]
    basic, arrays, dim = [], [], 0
    for item in _completed(items, batch_size):
        used = _consumed(item)
        first, second = _split(item, dim, batch_size[dim : dim + used])
        basic += first
        arrays += second
        dim += used
    return (*basic, ...), tuple(arrays)


def _parsed(item: Any) -> Any:
    if item is None or item is Ellipsis or isinstance(item, (slice, Tracer)):
        return item
    array = np.asarray(item)
    if not array.size and isinstance(item, (list, range)):
        return array.astype(int)
    if array.dtype.kind not in "iub":
        raise IndexError(
            f"got {item!r}: the batch is indexed by integers, slices, None, ... and arrays of "
            "integers or booleans, and a key is a string or a tuple of strings."
        )
    return array


def _completed(items: Sequence[Any], batch_size: tuple[int, ...]) -> list[Any]:
    """The items with an index for every batch dimension and no ellipsis."""
    used = sum(_consumed(item) for item in items)
    rest = len(batch_size) - used
    if rest < 0:
        raise IndexError(
            f"too many indices for batch_size {list(batch_size)}: got {used}. Index a leaf for its "
            "event dimensions."
        )
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"an index can have only a single ellipsis, got {len(dots)}.")
    at = dots[0] if dots else len(items)
    return [*items[:at], *[_ALL] * rest, *items[at + 1 :]]


def _consumed(item: Any) -> int:
    """How many dimensions one index takes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if _is_mask(item) else 1


def _is_mask(item: Any) -> bool:
    return not isinstance(item, slice) and item.dtype == np.bool_


def _split(item: Any, dim: int, sizes: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """One index in two: for the first step, and for the dimensions that it leaves."""
    if item is None or isinstance(item, slice):
        return [item], [_ALL]
    if _is_mask(item):
        if item.shape != sizes:
            raise IndexError(
                f"boolean index did not match the batch dims of size {list(sizes)} from dim {dim} "
                f"on: got shape {item.shape}."
            )
        # A mask of no dimension selects all or nothing along a new dimension.
        return ([_ALL] * item.ndim, [*item.nonzero()]) if sizes else ([None], [np.arange(item)])
    if not isinstance(item, Tracer):
        _check_range(item, dim, *sizes)
        item = item if item.ndim else int(item)
    return ([_ALL], [item]) if np.ndim(item) else ([item], [])


def _check_range(item: np.ndarray, dim: int, size: int) -> None:
    wrong = item[(item < -size) | (item >= size)]
    if wrong.size:
        raise IndexError(f"index {wrong[0]} is out of bounds for batch dim {dim} of size {size}.")


def indexed(leaf: Any, steps: tuple[Index, Index]) -> Any:
    """The leaf, its leading dimensions indexed; itself where nothing is left out."""
    for step in steps:
        if not all(item is Ellipsis or _is_all(item) for item in step):
            leaf = leaf[step]
    return leaf


def _is_all(item: Any) -> bool:
    return isinstance(item, slice) and item == _ALL


def indexed_size(steps: tuple[Index, Index], batch_size: tuple[int, ...]) -> tuple[int, ...]:
    """The batch size that is left, for a tree that has no leaf to tell it."""
    known = [
        tuple([np.zeros(i.shape, int) if isinstance(i, Tracer) else i for i in step])
        for step in steps
    ]
    return np.broadcast_to(np.int8(0), batch_size)[known[0]][known[1]].shape


def indexed_names(steps: tuple[Index, Index], names: Names) -> Names:
    """The names of the dimensions that are left.

    A slice, a list or a mask of one dimension keeps its dimension's name. What None, several
    arrays together or an array of more dimensions make are dimensions without one.
    """
    rest, left = iter(names), []
    for item in steps[0][:-1]:
        name = None if item is None else next(rest)
        left += [name] if item is None or isinstance(item, slice) else []
    left += rest
    at = [i for i, item in enumerate(steps[1]) if not isinstance(item, slice)]
    if not at:
        return tuple(left)
    dims = max(np.ndim(steps[1][i]) for i in at)
    block = [left[at[0]]] if len(at) == dims == 1 else [None] * dims
    others = [name for i, name in enumerate(left) if i not in at]
    # Arrays that stand apart put their dimensions in front, as in numpy.
    first = at[0] if at[-1] - at[0] == len(at) - 1 else 0
    return (*others[:first], *block, *others[first:])
