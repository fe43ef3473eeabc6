"""What the tests of collectives pass on each rank, and what numpy makes of it."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, reduce
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

import tdbridge
from tdbridge.errors import CollectiveError
from tests import zoo

UNSIGNED = ["uint8", "uint16", "uint32", "uint64"]
SIGNED = ["int8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
FLOAT8 = [name for name in zoo.BOTH if name.startswith("float8")]
INTEGERS = UNSIGNED + SIGNED

CARRIES = {
    "sum": INTEGERS + FLOATS + COMPLEX,
    "mean": FLOATS + COMPLEX,
    "max": ["bool", *INTEGERS, *FLOATS, *FLOAT8],
    "min": ["bool", *INTEGERS, *FLOATS, *FLOAT8],
    "product": INTEGERS + FLOATS,
}
"""The dtypes that each reduction takes."""


def part(name: str, rank: int, *shape: int) -> np.ndarray:
    """What a rank has of a dtype: integers of all sizes, floats that add up without rounding."""
    dtype, count = zoo.numpy_dtype(name), int(np.prod(shape))
    if name in INTEGERS:
        raw = np.random.default_rng(rank).bytes(count * dtype.itemsize)
        return np.frombuffer(raw, dtype).reshape(shape)
    steps = np.arange(count)
    if name == "bool":
        return ((steps + rank) % 3 == 0).reshape(shape)
    if name in COMPLEX:
        return ((steps + rank) % 4 - 1j * (steps % 3 + rank)).astype(dtype).reshape(shape)
    if name == "float8_e8m0fnu":  # powers of two alone
        return np.exp2((steps + rank) % 5 - 2.0).astype(dtype).reshape(shape)
    sign = 1 if name in FLOAT8 else (-1) ** (steps + rank)
    return (((steps + rank) % 4 + 1) * sign).astype(dtype).reshape(shape)


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """By way of the bytes: torch takes no bfloat16 of numpy."""
    name = array.dtype.name
    raw = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
    return raw.view(getattr(torch, name)).reshape(array.shape)


def reduced(op: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """What the ranks' parts are together, in their own dtype."""
    parts = list(parts)
    dtype = parts[0].dtype
    combine: dict[str, Callable[..., Any]] = {
        "sum": np.add, "mean": np.add, "product": np.multiply,
        "max": np.logical_or if dtype.kind == "b" else np.maximum,
        "min": np.logical_and if dtype.kind == "b" else np.minimum,
    }  # fmt: skip
    if dtype.name in FLOAT8:
        return reduce(combine[op], [p.astype(np.float32) for p in parts]).astype(dtype)
    total = reduce(combine[op], parts)
    if op != "mean":
        return total.astype(dtype)
    if dtype.name in COMPLEX:  # part by part
        real = total.view(np.finfo(dtype).dtype)
        return (real / real.dtype.type(len(parts))).view(dtype)
    return (total / dtype.type(len(parts))).astype(dtype)


def columns(names: Sequence[str], rank: int, *shape: int) -> TensorDict:
    """A leaf of each dtype, half of them nested."""
    leaves = {name: as_tensor(part(name, rank, *shape)) for name in names}
    odd = dict(list(leaves.items())[::2])
    rest: dict[str, Any] = {key: value for key, value in leaves.items() if key not in odd}
    return TensorDict({"n": odd, **rest}, batch_size=shape[:1])


def consolidated(names: Sequence[str], rank: int, *shape: int) -> Any:
    return tdbridge.consolidate(columns(names, rank, *shape))


def arraydict(names: Sequence[str], rank: int, *shape: int) -> Any:
    with jax.enable_x64(True):
        return tdbridge.to_jax(columns(names, rank, *shape))


def packed(names: Sequence[str], rank: int, *shape: int) -> Any:
    with jax.enable_x64(True):
        return tdbridge.to_jax(consolidated(names, rank, *shape), packed=True)


def numpys(names: Sequence[str], rank: int, *shape: int) -> Any:
    return [{name: part(name, rank, *shape)} for name in names]


FORMS = {f.__name__: f for f in (consolidated, columns, arraydict, packed, numpys)}


def bits(tree: Any) -> dict[str, np.ndarray]:
    """The values of any of these trees, by dtype."""
    if isinstance(tree, list):
        return {key: np.asarray(value) for entry in tree for key, value in entry.items()}
    if isinstance(tree, tdbridge.PackedArrayDict):
        tree = tree.unpack()
    if isinstance(tree, tdbridge.ArrayDict):
        paths = [("n", key) for key in tree["n"]] + [(key,) for key in tree if key != "n"]
        return {path[-1]: np.asarray(tree[path]) for path in paths}
    return {path[-1]: zoo.as_numpy(leaf) for path, leaf in zoo.leaves(tree).items()}


def wrong(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> list[str]:
    """The dtypes whose bits are not the expected ones."""
    assert got.keys() == expected.keys()
    return [name for name in got if not zoo.same_bits(got[name], expected[name])]


@cache
def group_of(ranks: tuple[int, ...], seconds: float = 60) -> Any:
    """A group of its own, made by all ranks: None on those that are no members."""
    group = dist.new_group(list(ranks), timeout=timedelta(seconds=seconds))
    return group if dist.get_rank() in ranks else None


def text_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text of the CollectiveError that a call raises, or of another error with its class."""
    try:
        call(*args, **kwargs)
    except CollectiveError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the test is told
        return f"{type(error).__name__}: {error}"
    return ""
