"""Indexing over the batch dimensions: the index completed, the names that are left."""

from typing import Any

import numpy as np

Index = tuple[Any, ...]
Names = tuple[str | None, ...]


def batch_index(index: Any, batch_size: tuple[int, ...]) -> Index:
    """`index` as a tuple that consumes every batch dimension and nothing beyond.

    An ellipsis stands for the batch dimensions that are left, never for event dimensions.

    Raises:
        IndexError: it has more indices than there are batch dimensions, an integer is out of
            range (JAX itself would clamp it), or there is more than one ellipsis.
    """
    items = [_as_array(item) for item in (index if isinstance(index, tuple) else (index,))]
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
    full = (*items[:at], *[slice(None)] * rest, *items[at + 1 :])
    _check_range(full, batch_size)
    return full


def _as_array(item: Any) -> Any:
    return np.asarray(item) if isinstance(item, (list, range)) else item


def _is_mask(item: Any) -> bool:
    return isinstance(item, (bool, np.bool_)) or getattr(item, "dtype", None) == np.bool_


def _consumed(item: Any) -> int:
    """How many dimensions one index takes."""
    if item is None or item is Ellipsis:
        return 0
    if _is_mask(item):
        return np.ndim(item)
    return 1


def _check_range(items: Index, batch_size: tuple[int, ...]) -> None:
    dim = 0
    for item in items:
        if isinstance(item, (int, np.integer)) and not _is_mask(item):
            size = batch_size[dim]
            if not -size <= item < size:
                raise IndexError(
                    f"index {item} is out of bounds for batch dim {dim} of size {size}."
                )
        dim += _consumed(item)


def indexed_size(items: Index, batch_size: tuple[int, ...]) -> tuple[int, ...]:
    """The batch size that is left, for a tree that has no leaf to tell it."""
    return np.broadcast_to(np.int8(0), batch_size)[items].shape


def indexed_names(items: Index, names: Names) -> Names | None:
    """The names of the dimensions that are left; None when they cannot be told apart.

    An integer drops its dimension's name, a slice, a list or a one-dimensional mask keeps it, a
    None adds an unnamed dimension. Any other array makes dimensions that no name belongs to.
    """
    left: list[str | None] = []
    rest = iter(names)
    arrays = 0
    for item in items:
        if item is None:
            left.append(None)
        elif isinstance(item, slice):
            left.append(next(rest))
        elif np.ndim(item) == 0 and not _is_mask(item):
            next(rest)
        elif np.ndim(item) == 1:
            left.append(next(rest))
            arrays += 1
        else:
            return None
    return (*left, *rest) if arrays < 2 else None
