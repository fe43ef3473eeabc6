"""The bits of a cast are those of the documented rules, whoever casts: torch, JAX or numpy."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdbridge import ArrayDict, cast
from tests import zoo

TARGETS = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# Written out, not asked of anyone.
NANS = {
    "bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000, "float64": 0x7FF8 << 48,
    "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E,
}  # fmt: skip


def patterns(name: str, count: int) -> np.ndarray:
    """All of a dtype of 16 bits or fewer; else `count` random ones and those at the edges."""
    dtype = zoo.numpy_dtype(name)
    unsigned = UNSIGNED[dtype.itemsize]
    if dtype.itemsize <= 2:
        return np.arange(2 ** (8 * dtype.itemsize)).astype(unsigned).view(dtype)
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, count, dtype=np.uint32)
    # Each exponent with the ends of the mantissa, and with each single bit of it: ties.
    low = np.array([0, 1, 2**23 - 1, *(2**i for i in range(23)), *(3 << i for i in range(22))])
    edges = (np.arange(512)[:, None] << 23 | low).astype(np.uint32).ravel()
    singles = np.concatenate([bits, edges]).view(np.float32)
    if name == "float32":
        return singles
    with np.errstate(all="ignore"):
        wide = singles.astype(np.float64)
        wide = np.concatenate([wide, np.nextafter(wide, 0), np.nextafter(wide, np.inf)])
    # XLA flushes what is subnormal in float32 where it converts from float64 on the CPU.
    return wide[~((np.abs(wide) < 2.0**-126) & (wide != 0))]


def rounded(values: np.ndarray, name: str) -> np.ndarray:
    """The documented rules, by ml_dtypes, which rounds to nearest even."""
    dtype = zoo.numpy_dtype(name)
    with np.errstate(all="ignore"):
        near = values.astype(np.float32) if values.dtype == np.float64 else values
        if name == "float8_e4m3fn":
            near = np.clip(near.astype(np.float32), -448, 448)
        bits = near.astype(dtype).view(UNSIGNED[dtype.itemsize])
        bits[np.isnan(values)] = NANS[name]
    return bits.view(dtype)


def in_torch(values: np.ndarray) -> torch.Tensor:
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[values.itemsize]
    return torch.from_numpy(values.view(signed)).view(getattr(torch, values.dtype.name))


def by_torch(values: np.ndarray, name: str) -> np.ndarray:
    return zoo.as_numpy(cast(TensorDict(x=in_torch(values)), name)["x"])


def by_strides(values: np.ndarray, name: str) -> np.ndarray:
    """torch has other code for what is not contiguous, which writes other NaN."""
    return zoo.as_numpy(cast({"x": in_torch(values.repeat(2))[::2]}, name)["x"])


def by_jax(values: np.ndarray, name: str) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(cast(ArrayDict({"x": jax.numpy.asarray(values)}), name)["x"])


def by_jit(values: np.ndarray, name: str) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(jax.jit(lambda x: cast(x, name))(values))


def by_numpy(values: np.ndarray, name: str) -> np.ndarray:
    return cast([values], name)[0]


WAYS: list[Callable[..., Any]] = [by_torch, by_strides, by_jax, by_jit, by_numpy]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_documented_bits(way: Callable[..., Any]):
    """All patterns of the 8- and 16-bit floats, and some of the others, to each dtype."""
    for source in ["float64", "float32", *TARGETS]:
        values = patterns(source, 10**4)
        for name in ["float32", *TARGETS]:
            if name != source:
                got = way(values, name)
                assert zoo.same_bits(got, rounded(values, name)), f"{source} to {name}"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ten_million_patterns_give_the_documented_bits(way: Callable[..., Any]):
    """Random float32 patterns, NaN, infinities and subnormals among them."""
    values = patterns("float32", 10**7)
    for name in TARGETS:
        assert zoo.same_bits(way(values, name), rounded(values, name)), name
