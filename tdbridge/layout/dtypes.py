"""The one table of dtypes: what a leaf can be made of, in torch, numpy and JAX.

numpy's name is the name everywhere (`"bfloat16"`, `"float8_e4m3fn"`): JAX uses it, and so do the
checkpoint formats. A dtype that one side lacks has None there.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from tdbridge.errors import LeafTypeError


@dataclass(frozen=True)
class DType:
    """One dtype as each framework spells it.

    Attributes:
        name: numpy's name, e.g. `"bfloat16"`; torch's where numpy has none.
        torch: the torch dtype, or None (int4, float8_e3m4, ... exist in JAX only).
        numpy: the numpy or ml_dtypes dtype, or None (complex32, float4 exist in torch only).
        itemsize: bytes per element.
    """

    name: str
    torch: torch.dtype | None
    numpy: np.dtype | None
    itemsize: int

    def __hash__(self) -> int:
        return hash(self.name)  # those of numpy and torch dtypes take ten times longer

    @property
    def crosses(self) -> bool:
        """Whether both sides have it."""
        return self.torch is not None and self.numpy is not None

    @property
    def in_torch(self) -> "torch.dtype":
        """The torch dtype.

        Raises:
            LeafTypeError: torch has none.
        """
        if self.torch is None:
            raise LeafTypeError(f"torch has no dtype {self.name}.")
        return self.torch

    @property
    def in_numpy(self) -> np.dtype:
        """The numpy or ml_dtypes dtype.

        Raises:
            LeafTypeError: neither has one.
        """
        if self.numpy is None:
            raise LeafTypeError(f"numpy and JAX have no dtype {self.name}.")
        return self.numpy


_BOTH = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 "
    "complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()
_TORCH_ONLY = {"complex32": torch.complex32, "float4_e2m1fn_x2": torch.float4_e2m1fn_x2}
_NUMPY_ONLY = (
    "int2 int4 uint2 uint4 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float4_e2m1fn".split()
)


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _table() -> tuple[DType, ...]:
    both = [(n, getattr(torch, n), _numpy_dtype(n)) for n in _BOTH]
    rows = [DType(n, t, d, d.itemsize) for n, t, d in both]
    rows += [DType(n, t, None, t.itemsize) for n, t in _TORCH_ONLY.items()]
    rows += [DType(n, None, d, d.itemsize) for n in _NUMPY_ONLY for d in [_numpy_dtype(n)]]
    return tuple(rows)


TABLE = _table()
_BY_NAME = {row.name: row for row in TABLE}
_BY_TORCH = {row.torch: row for row in TABLE if row.torch is not None}
_BY_NUMPY = {row.numpy: row for row in TABLE if row.numpy is not None}
_KNOWN: dict[object, DType] = {**_BY_NAME, **_BY_TORCH, **_BY_NUMPY}

# What JAX makes of a 64-bit dtype while x64 is off.
NARROWED = {
    "int64": "int32",
    "uint64": "uint32",
    "float64": "float32",
    "complex128": "complex64",
}


def dtype_of(dtype: object) -> DType:
    """Looks a dtype up by its torch dtype, numpy dtype or name.

    Raises:
        LeafTypeError: the dtype is not one that a leaf can have (object, string, datetime).

    Example:
        >>> import torch
        >>> dtype_of(torch.bfloat16).name
        'bfloat16'
        >>> dtype_of("int64").itemsize
        8
    """
    found = _KNOWN.get(dtype)
    if found is None and isinstance(dtype, np.dtype):
        found = _KNOWN.get(dtype.newbyteorder("="))  # a foreign byte order is the same dtype
    if found is None:
        raise LeafTypeError(f"got dtype {dtype!r}, which is none of {', '.join(_BY_NAME)}.")
    return found
