"""The ways by which a pickle can go, and what went by them."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests import zoo

ALLOWED = [
    *(zoo.Step, zoo.Batch, np.ndarray, np.dtype, np.dtypes.Int64DType),
    *(np._core.multiarray._reconstruct, np._core.numeric._frombuffer),  # type: ignore[attr-defined]
]
"""What torch.load(weights_only=True) refuses in trees of the zoo until it is allowed."""


def out_of_band(tree: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """The pickle of a tree without its buffers, and those."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(tree, protocol=5, buffer_callback=buffers.append), buffers


def aligned(data: Any) -> np.ndarray:
    """The bytes of a buffer in fresh memory that starts on a multiple of 64, as a transport has."""
    source = np.frombuffer(data, np.uint8) if memoryview(data) else np.empty(0, np.uint8)
    room = np.empty(source.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + source.size] = source
    return room[start : start + source.size]


def by_memory(tree: Any) -> Any:
    data, buffers = out_of_band(tree)
    return pickle.loads(data, buffers=list(map(aligned, buffers)))


def by_bytes(tree: Any) -> Any:
    data, buffers = out_of_band(tree)
    return pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])


def by_protocol(protocol: int) -> Callable[[Any], Any]:
    def route(tree: Any) -> Any:
        return pickle.loads(pickle.dumps(tree, protocol=protocol))

    route.__name__ = f"protocol_{protocol}"
    return route


def by_torch(tree: Any) -> Any:
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    with torch.serialization.safe_globals(ALLOWED):
        return torch.load(file, weights_only=True)


NEW: list[Callable[[Any], Any]] = [by_memory, by_bytes, by_protocol(5)]
OLD: list[Callable[[Any], Any]] = [*map(by_protocol, (2, 3, 4)), by_torch]
