"""What the tests of the conversions share: bit patterns, addresses, what errors list."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import torch

from tests import zoo

Path = tuple[str, ...]

HALF_BITS = np.arange(2**16, dtype=np.uint16)
FLOAT_BITS = np.array(
    [
        0x00000000, 0x80000000,  # zero and minus zero
        0x00000001, 0x807FFFFF,  # subnormal: the smallest, and the largest below zero
        0x00800000, 0x7F7FFFFF,  # normal: the smallest and the largest
        0x7F800000, 0xFF800000,  # infinities
        0x7FC00000, 0x7FC12345, 0xFFC54321,  # quiet NaN, with payloads
        0x7F800001, 0xFFBFFFFF,  # signalling NaN
        0x3F800000, 0xC0490FDB,
        0x4B800000,
    ],
    np.uint32,
)  # fmt: skip
DOUBLE_BITS = np.array(
    [
        0x0000000000000000, 0x8000000000000000,
        0x0000000000000001, 0x800FFFFFFFFFFFFF,
        0x0010000000000000, 0x7FEFFFFFFFFFFFFF,
        0x7FF0000000000000, 0xFFF0000000000000,
        0x7FF8000000000000, 0x7FF8000012345678, 0xFFF8765432100000,
        0x7FF0000000000001, 0xFFF7FFFFFFFFFFFF,
        0x3FF0000000000000, 0xC00921FB54442D18,
        0x4340000000000001,
    ],
    np.uint64,
)  # fmt: skip


def extremes(name: str) -> np.ndarray:
    """Values of a dtype that a cast, a flush to zero or a wrap would change; 16 at least."""
    dtype = zoo.numpy_dtype(name)
    if name == "bool":
        return np.arange(16) % 3 == 0
    if dtype.kind == "c":
        return (FLOAT_BITS if dtype.itemsize == 8 else DOUBLE_BITS).view(dtype)
    if dtype.kind in "iu" and dtype.itemsize > 2:
        info = np.iinfo(dtype)
        middle = [0, 1, info.max // 2, info.max - 1, info.max, info.min, info.min + 1]
        return np.array((middle * 3)[:16], dtype)
    bits = {1: HALF_BITS[:256].astype(np.uint8), 2: HALF_BITS, 4: FLOAT_BITS, 8: DOUBLE_BITS}
    return bits[dtype.itemsize].view(dtype)


def tensor_of(values: np.ndarray) -> torch.Tensor:
    """A fresh tensor, 64-byte aligned, of the bits of a numpy array of any dtype, bf16 included."""
    raw = torch.empty(values.nbytes, dtype=torch.uint8)
    raw.numpy()[:] = np.frombuffer(values.tobytes(), np.uint8)
    return raw.view(getattr(torch, values.dtype.name)).reshape(values.shape)


def aligned(values: np.ndarray) -> np.ndarray:
    """A numpy array of the same values that starts on a multiple of 64 bytes."""
    room = np.empty(values.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    new = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    new[...] = values
    return new


def x64_for(name: str) -> AbstractContextManager[None]:
    """x64 on where a tree of the zoo needs it."""
    return jax.enable_x64(name in zoo.X64_ONLY)


def address(array: Any) -> int:
    """Where the values of a tensor, an array on one device, or a numpy array lie."""
    if isinstance(array, torch.Tensor):
        return array.data_ptr()
    return array.ctypes.data if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()


def pairs(left: Any, right: Any) -> Iterator[tuple[Path, Any, Any]]:
    """The leaves of two trees of the same paths: the first is a TensorDict or a tensorclass."""
    for path, tensor in zoo.leaves(left).items():
        yield path, tensor, right[path]


def listed(error: BaseException) -> dict[str, str]:
    """The leaves that an error lists, each with the reason: `  ['a', 'b']: reason`."""
    return dict(re.findall(r"^  (\[.*?\]): (.*)$", str(error), re.MULTILINE))
