"""Tensors that JAX cannot share, copied into fresh memory that it can."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from tdbridge._compat.torch import copy_all
from tdbridge.convert.sharing import narrowed_dtype, why_copied
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.spec import ALIGNMENT, padded, row_major

# Small leaves lie together in one buffer: that spares each an allocation, which costs more than
# its bytes do. A larger leaf has nothing to gain from it and has memory of its own.
SMALL = 2**12
# Whoever keeps one leaf keeps its buffer: at most this much, of a tree of any size.
BUFFER = 2**18


def shareable(tensors: Sequence[torch.Tensor], *, copy: bool = False) -> list[torch.Tensor]:
    """The tensors as JAX can share them: each itself where it can be, else a fresh, aligned copy.

    Args:
        tensors: carried and detached; of the 64-bit ones that JAX narrows, `check_narrow` has seen
            that they may be.
        copy: copies all of them.
    """
    kept = {dtype: _kept(dtype) for dtype in {tensor.dtype for tensor in tensors}}
    new = list(tensors)
    at = [
        i
        for i, tensor in enumerate(tensors)
        if copy or kept[tensor.dtype] is not tensor.dtype or why_copied(tensor) is not None
    ]
    sources = [tensors[i] for i in at]
    for pack in packs(sources):
        for i, room in zip(pack, _rooms([sources[i] for i in pack], kept), strict=True):
            new[at[i]] = room
    copy_all([new[i] for i in at], sources)
    return new


def _kept(dtype: torch.dtype) -> torch.dtype:
    """What JAX makes of a dtype."""
    narrow = narrowed_dtype(dtype)
    return dtype if narrow is None else dtype_of(narrow).in_torch


def packs(tensors: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """The positions of the tensors in groups: small ones on the CPU together, any other alone."""
    pack, room = [], BUFFER
    for i, tensor in enumerate(tensors):
        size = tensor.nbytes + ALIGNMENT  # with its padding
        if size > SMALL or not tensor.is_cpu:
            yield [i]
            continue
        if size > room:
            yield pack
            pack, room = [], BUFFER
        pack.append(i)
        room -= size
    if pack:
        yield pack


def _rooms(
    pack: Sequence[torch.Tensor], kept: dict[torch.dtype, torch.dtype]
) -> list[torch.Tensor]:
    """Fresh memory for each tensor in its new dtype: one buffer, every start a multiple of 64."""
    dtypes = [kept[tensor.dtype] for tensor in pack]
    sizes = [padded(t.numel() * d.itemsize) for t, d in zip(pack, dtypes, strict=True)]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=pack[0].device)
    flat = {dtype: buffer.view(dtype) for dtype in set(dtypes)}
    starts = accumulate(sizes, initial=0)
    return [
        torch.as_strided(
            flat[dtype], tensor.shape, row_major(tensor.shape), start // dtype.itemsize
        )
        for tensor, dtype, start in zip(pack, dtypes, starts, strict=False)
    ]
