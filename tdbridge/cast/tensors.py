"""Tensors of one dtype -> another, with the one NaN of the new dtype, as `numbers` has it.

torch's vector code writes another NaN than its scalar code, so that the result is searched for NaN:
all small tensors at once, and a large one alone, while it is in the cache.
"""

from collections.abc import Iterator, Sequence
from math import isnan
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from tdbridge._compat.torch import all_of_plain_type, all_plain, copy_all
from tdbridge.cast.numbers import is_float, nan_bits
from tdbridge.layout.dtypes import DType, dtype_of

_SMALL = 2**12  # elements
_CACHED = 2**18
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_dtype = attrgetter("dtype")


def cast_tensors(tensors: Sequence[Tensor], dtype: DType) -> list[Tensor]:
    """Each tensor in another dtype; gradients pass through as through `Tensor.to`.

    The bits are those that JAX gives for plain tensors; a subclass casts as it does itself.
    """
    target = dtype.in_torch
    if (stack := _stacked(tensors)) is not None:
        cast = stack.to(dtype=target)
        _one_nan([stack], [cast], dtype)
        parts: Any = torch.unbind_copy(cast)  # its stub has it return nothing
        return list(parts)
    if not all_plain(tensors):
        return [tensor.to(dtype=target) for tensor in tensors]
    new: dict[int, Tensor] = {}
    for group in _groups(tensors):
        # By keyword: torch looks for a device in a positional argument first, 0.6 us a leaf.
        made = [tensors[i].to(dtype=target) for i in group]
        _one_nan([tensors[i] for i in group], made, dtype)
        new.update(zip(group, made, strict=True))
    return [new[i] for i in range(len(tensors))]


def copy_cast(old: Tensor, new: Tensor) -> None:
    """Copies a plain tensor into one of another dtype, or of the same; no gradients."""
    if old.dtype == new.dtype:
        with torch.no_grad():
            new.copy_(old)
        return
    for source, target in _pieces(old, new):
        with torch.no_grad():
            target.copy_(source)
        _one_nan([source], [target], dtype_of(new.dtype))


def _pieces(old: Tensor, new: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """What is searched for NaN while it is in the cache."""
    if not (old.dim() == 1 and old.is_cpu and new.is_cpu):
        return iter([(old, new)])
    return zip(old.split(_CACHED), new.split(_CACHED), strict=True)


def copy_all_cast(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """The same of many."""
    copy_all(new, old)
    for dtype in {*map(_dtype, new)}:
        pairs = zip(old, new, strict=True)
        cast = [(a, b) for a, b in pairs if b.dtype == dtype and a.dtype != dtype]
        for group in _groups([b for _, b in cast]):
            _one_nan([cast[i][0] for i in group], [cast[i][1] for i in group], dtype_of(dtype))


def _stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    """Small tensors of one dtype and shape as one; None if they are not, or ask for gradients.

    A stack is cast, and taken apart by one call, in two thirds of the time of a loop (measured).
    """
    first = tensors[0]
    if len(tensors) == 1 or first.numel() > _SMALL or not all_of_plain_type(tensors):
        return None
    if not first.is_cpu or len({*map(_dtype, tensors)}) > 1:  # which would be promoted
        return None
    try:
        stack = torch.stack(list(tensors))
    except RuntimeError:  # of several shapes, on several devices, sparse
        return None
    # Of a vector alone there is one way to lie in memory, which a cast keeps.
    dense = stack.dim() <= 2 or all(map(Tensor.is_contiguous, tensors))
    return stack if dense and all_plain([stack]) and not stack.requires_grad else None


def _groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Those that are searched for NaN as one, and any other alone, as soon as it is cast."""
    small = [i for i, tensor in enumerate(tensors) if tensor.is_cpu and tensor.numel() <= _SMALL]
    other = sorted({*range(len(tensors))}.difference(small))
    return [*([small] if small else []), *([i] for i in other)]


def _one_nan(old: Sequence[Tensor], new: Sequence[Tensor], dtype: DType) -> None:
    """Writes the one NaN of `dtype` into each of `new`, where that of `old` is NaN."""
    if is_float(dtype) and _may_hold_nan(old, new):
        with torch.no_grad():
            for source, target in zip(old, new, strict=True):
                bits = target.view(_SIGNED[dtype.itemsize])
                bits.masked_fill_(source.isnan().to(bits.device), nan_bits(dtype))


def _may_hold_nan(old: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    """On the CPU a sum tells; elsewhere the answer would have to be waited for.

    A sum is ten times faster than `isnan().any()`, and of float32 faster than of half of it.
    """
    if not new[0].is_cpu:
        return True
    if len(new) == 1:
        return _sum_is_nan(*sorted((new[0], old[0]), key=_is_not_float32))
    side = new if new[0].itemsize > 1 else old
    return _sum_is_nan(torch.cat([*map(torch.flatten, side)]))


def _is_not_float32(tensor: Tensor) -> bool:
    return tensor.dtype != torch.float32


def _sum_is_nan(*sides: Tensor) -> bool:
    """Whether the sum of the first that has a cheap one is NaN; True if none has any."""
    summable = [side for side in sides if side.itemsize > 1]  # torch has no sum of float8
    if not summable:
        return True
    if (dense := next(filter(Tensor.is_contiguous, summable), None)) is not None:
        return isnan(dense.sum().item())
    # By rows first: the sum of all of a matrix with gaps between its rows takes ten times longer.
    return isnan(summable[0].sum(-1).sum().item())
