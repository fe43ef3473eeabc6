"""Datasets, transforms and collate functions that workers import, and what a batch must be."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorClass, TensorDict
from torch.utils.data import Dataset

from tdbridge.loaders import collate
from tests import zoo

# A spawned worker takes seconds to start; a forkserver is one more that does.
CONTEXTS = ("fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow))


class Point(TensorClass):
    at: torch.Tensor
    label: str


class Pair(NamedTuple):
    image: Any
    label: Any


def arrays(i: int) -> dict[str, Any]:
    """What sample `i` is made of, as numpy."""
    return {
        "x": np.arange(3, dtype=np.float32) + 10 * i,
        "h": np.full((2, 2), i, ml_dtypes.bfloat16),
        "n": np.int32(i),
    }


def sample(kind: str, i: int) -> Any:
    x, h, n = arrays(i).values()
    as_tensors = {"x": torch.tensor(x), "h": torch.tensor(h.astype("f4")).bfloat16()}
    match kind:
        case "mapping":
            return {"x": x, "deep": {"h": h, "n": n}, "text": f"sample {i}"}
        case "tensordict":
            return TensorDict({**as_tensors, "text": f"sample {i}"})
        case "tensorclass":
            return Point(at=torch.tensor(x), label="same", batch_size=[3])
        case "namedtuple":
            return Pair(torch.tensor(x), i)
    raise ValueError(kind)


class Samples(Dataset[Any]):
    def __init__(self, kind: str, count: int = 6) -> None:
        self.kind, self.count = kind, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return sample(self.kind, i)


class ShowsMemory(Samples):
    """Gives a batch with what the worker sees of it: the name of the process and the storage."""

    def __getitems__(self, indices: list[int]) -> Any:
        batch = collate([self[i] for i in indices])
        shared = all(leaf.is_shared() for leaf in zoo.leaves(batch).values())
        again = collate(batch) is batch
        return TensorDict({**batch, "seen": NonTensorData((shared, again), batch_size=[2])}, [2])


class Offends(Dataset[Any]):
    """Computes with JAX: in the dataset, in a transform of it, or in the collate function."""

    def __init__(self, where: str) -> None:
        self.transform = double if where == "transform" else None
        self.itself = where == "dataset"

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        if self.itself:
            return np.asarray(jnp.arange(3) + i)
        return self.transform(np.arange(3) + i) if self.transform else np.arange(3) + i


def double(x: Any) -> Any:
    return np.asarray(jnp.asarray(x) * 2)


def offending_collate(samples: list[Any]) -> Any:
    return np.asarray(jnp.stack(samples))


class OffendsLater(Offends):
    """Computes with JAX from its second batch on."""

    def __getitem__(self, i: int) -> Any:
        return np.asarray(jnp.arange(3) + i) if i >= 2 else np.arange(3)


class Calls(Offends):
    def __init__(self, function: Any) -> None:
        super().__init__("nowhere")
        self.transform = function


class UsesTrees(Dataset[Any]):
    """Uses of JAX that need no backend."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Any:
        return jax.tree.map(lambda leaf: np.asarray(leaf) + i, {"x": self.held})
