"""Arrays of every dtype, made of bits, and the trees that the tests save."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

# What torch, JAX and numpy all have, by numpy's name.
COMMON = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]

# NaNs quiet, signalling, negative, with payloads; -0.0; infinities; the smallest subnormal.
FLOAT32_BITS = [0x7FC00000, 0x7F800001, 0xFFC12345, 0x80000000, 0xFF800000, 0x00000001]


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def bits(name: str, shape: tuple[int, ...] = (4, 3), seed: int = 0) -> np.ndarray:
    """An array of random bits; every pattern of them is allowed but for bool."""
    dtype = numpy_dtype(name)
    top = 2 if name == "bool" else 256
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, top, count, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def tensor(array: np.ndarray) -> torch.Tensor:
    """The same bits as a tensor, by way of `torch.frombuffer`."""
    dtype = getattr(torch, array.dtype.name)
    if array.size == 0:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.tobytes()), dtype=dtype).reshape(array.shape)


def same_bits(found: Any, expected: np.ndarray) -> bool:
    """Whether a tensor, JAX or numpy array has the dtype, the shape and the bits of `expected`."""
    if isinstance(found, torch.Tensor):
        if found.dtype != getattr(torch, expected.dtype.name) or found.shape != expected.shape:
            return False
        return bytes(found.contiguous().flatten().view(torch.uint8).tolist()) == expected.tobytes()
    found = np.asarray(found)
    same_kind = found.dtype == expected.dtype and found.shape == expected.shape
    return same_kind and found.tobytes() == expected.tobytes()
