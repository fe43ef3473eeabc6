"""Numbers of one dtype -> another, with the same bits in torch, JAX and numpy.

The frameworks differ in three points; docs/cast.md has the table. One choice for each:

* a NaN becomes the one quiet NaN of the new dtype, without its sign and payload;
* what is too large for float8_e4m3fn, infinity too, becomes its largest number, as in torch;
* float64 is rounded to float32 on its way to fewer bits, as in torch.

Here they are kept in JAX and numpy; `tensors` keeps the first one, which torch lacks.
"""

from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tdbridge.layout.dtypes import DType, dtype_of

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LARGEST = {"float8_e4m3fn": 448.0}


def is_float(dtype: DType) -> bool:
    """Whether it is one of real floating-point numbers, on both sides."""
    return dtype.crosses and dtype.in_torch.is_floating_point


@cache
def nan_bits(dtype: DType) -> int:
    """The bits of the NaN that numpy writes."""
    return int(np.array(np.nan, dtype.in_numpy).view(_UNSIGNED[dtype.itemsize]))


def _is_in_two_steps(source: DType, target: DType) -> bool:
    return source.name == "float64" and target.itemsize < 4


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
    bits = jnp.where(nan, np.array(nan_bits(dtype), unsigned), bits)
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
