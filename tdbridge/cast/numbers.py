"""Numbers of one dtype -> another, with the same bits in torch, JAX and numpy.

The frameworks differ in three points; docs/cast.md has the table. One choice for each:

* a NaN becomes the one quiet NaN of the new dtype, without its sign and payload;
* what is too large for float8_e4m3fn, infinity too, becomes its largest number, as in torch;
* float64 is rounded to float32 on its way to fewer bits, as in torch.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import Tensor

from tdbridge._compat.torch import all_plain
from tdbridge.layout.dtypes import DType, dtype_of

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST = {"float8_e4m3fn": 448.0}


def is_float(dtype: DType) -> bool:
    """Whether it is one of real floating-point numbers, on both sides."""
    return dtype.crosses and dtype.in_torch.is_floating_point


@cache
def _nan_bits(dtype: DType) -> int:
    """The bits of the NaN that numpy writes."""
    return int(np.array(np.nan, dtype.in_numpy).view(_UNSIGNED[dtype.itemsize]))


def _is_in_two_steps(source: DType, target: DType) -> bool:
    return source.name == "float64" and target.itemsize < 4


# --- torch


def cast_tensors(tensors: Sequence[Tensor], dtype: DType) -> list[Tensor]:
    """Each tensor in another dtype; gradients pass through as through `Tensor.to`.

    The bits are those that JAX gives for plain tensors; a subclass casts as it does itself.
    """
    target = dtype.in_torch
    new = [tensor.to(target) for tensor in tensors]
    if all_plain(tensors):
        one_nan(list(zip(tensors, new, strict=True)), dtype)
    return new


def one_nan(pairs: Sequence[tuple[Tensor, Tensor]], dtype: DType) -> None:
    """Writes the one NaN of `dtype` into the second of each pair, where the first is NaN."""
    if not is_float(dtype):
        return
    if not all(source.is_floating_point for source in {old.dtype for old, _ in pairs}):
        pairs = [pair for pair in pairs if pair[0].dtype.is_floating_point]
    with torch.no_grad():
        for group in _groups(pairs):
            if _may_hold_nan(group):
                for old, new in group:
                    bits = new.view(_SIGNED[dtype.itemsize])
                    bits.masked_fill_(old.isnan(), _nan_bits(dtype))


def _groups(pairs: Sequence[tuple[Tensor, Tensor]]) -> Sequence[Sequence[tuple[Tensor, Tensor]]]:
    """Small ones on the CPU, which are asked at once, and any other alone."""
    new = [pair[1] for pair in pairs]
    if all(map(_is_cpu, new)) and max(map(Tensor.numel, new), default=0) <= _SMALL:
        return [pairs]
    small = [pair for pair in pairs if pair[1].is_cpu and pair[1].numel() <= _SMALL]
    other = [pair for pair in pairs if not (pair[1].is_cpu and pair[1].numel() <= _SMALL)]
    return [small, *([pair] for pair in other)]


_SMALL = 2**12
_is_cpu = attrgetter("is_cpu")


def _may_hold_nan(group: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """On the CPU a sum tells; elsewhere the answer would have to be waited for.

    A sum is ten times faster than `isnan().any()`, and of the narrower side faster still.
    """
    if not group or not group[0][1].is_cpu:
        return bool(group)
    # torch has no sum of float8.
    by_new = group[0][1].itemsize > 1  # all of them: they are of one dtype
    sides = [new for _, new in group] if by_new else [old for old, _ in group]
    if not by_new and any(side.itemsize == 1 for side in sides):
        return True
    whole = sides[0] if len(sides) == 1 else torch.cat([*map(torch.flatten, sides)])
    # By rows first: the sum of all of a matrix with gaps between its rows takes ten times longer.
    return bool(whole.sum(-1).sum().isnan())


# --- JAX


@partial(jax.jit, static_argnums=1, inline=True)
def _cast_traced(array: Any, dtype: DType) -> Any:
    """Compiled once for all leaves of one shape."""
    source = dtype_of(array.dtype)
    if is_float(source) and is_float(dtype):
        return _cast_float(array, dtype)
    return lax.convert_element_type(array, dtype.in_numpy)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _cast_float(array: Any, dtype: DType) -> Any:
    nan = jnp.isnan(array)
    if _is_in_two_steps(dtype_of(array.dtype), dtype):
        array = lax.reduce_precision(array, 8, 23)
    if (most := _LARGEST.get(dtype.name)) is not None:
        array = lax.clamp(_like(-most, array), array, _like(most, array))
    new = lax.convert_element_type(array, dtype.in_numpy)
    # By its bits: XLA's CPU backend selects among float8 as float16, and changes the NaN.
    unsigned = _UNSIGNED[dtype.itemsize]
    bits = lax.bitcast_convert_type(new, unsigned)
    bits = jnp.where(nan, np.array(_nan_bits(dtype), unsigned), bits)
    return lax.bitcast_convert_type(bits, dtype.in_numpy)


def _like(value: float, array: Any) -> Any:
    """No more than the array can hold: of a narrower one nothing is too large."""
    with np.errstate(over="ignore"):
        return np.array(value).astype(array.dtype)


@_cast_float.defjvp
def _cast_float_jvp(dtype: DType, primals: Any, tangents: Any) -> Any:
    """Gradients pass through, also where a value is NaN or was too large, as in torch."""
    (array,), (tangent,) = primals, tangents
    return _cast_float(array, dtype), lax.convert_element_type(tangent, dtype.in_numpy)


def cast_array(array: Any, dtype: DType) -> Any:
    """A jax array, numpy array or ShapeDtypeStruct in another dtype.

    Eager or traced; 64-bit arrays stay what they are while x64 is off, too.
    """
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(dtype=dtype.in_numpy)
    if isinstance(array, (np.ndarray, np.generic)):
        return _cast_numpy(array, dtype)
    wide = max(array.dtype.itemsize, dtype.itemsize) > 4
    with jax.enable_x64(True) if wide else nullcontext():
        return _cast_traced(array, dtype)


# --- numpy


def _cast_numpy(array: Any, dtype: DType) -> Any:
    source = dtype_of(array.dtype)
    if not (is_float(source) and is_float(dtype)):
        return array.astype(dtype.in_numpy)
    with np.errstate(all="ignore"):
        new = array.astype(np.float32) if _is_in_two_steps(source, dtype) else array
        if (most := _LARGEST.get(dtype.name)) is not None:
            new = np.clip(new, _like(-most, new), _like(most, new))
        new = np.asarray(new.astype(dtype.in_numpy))
        new[np.isnan(array)] = np.nan
    return new if isinstance(array, np.ndarray) else new[()]
