"""What a tree is, where its leaves must lie, and what is seen of it in another process."""

from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, is_tensorclass
from torch.utils.data import Dataset

import tdbridge
from tests import zoo

Path = tuple[str, ...]


def places(arrays: dict[Path, np.ndarray]) -> tuple[dict[Path, int], int]:
    """Where each leaf must start, and the size of the buffer: by dtype name, then by path."""
    offset, found = 0, {}
    for path in sorted(arrays, key=lambda path: (arrays[path].dtype.name, path)):
        found[path] = offset
        offset += -(-arrays[path].nbytes // 64) * 64
    return found, offset


def buffer_of(tree: Any) -> np.ndarray:
    """The bytes of the memory that the first leaf lies in."""
    first = next(iter(zoo.leaves(tree).values()))
    return torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage()).numpy()


def assert_same_leaves(found: Any, arrays: dict[Path, np.ndarray]) -> None:
    leaves = zoo.leaves(found)
    assert set(leaves) == set(arrays)
    for path, array in arrays.items():
        assert zoo.same_bits(zoo.as_numpy(leaves[path]), array), path


def assert_same_nodes(found: Any, source: Any, *, order: bool = True) -> None:
    """Classes, batch sizes, names, devices, keys and non-tensor entries, at every level."""
    nodes, others = zoo.nodes(source), zoo.nodes(found)
    assert set(others) == set(nodes)
    for path, node in nodes.items():
        other = others[path]
        assert type(other) is type(node), path
        assert other.batch_size == node.batch_size, path
        assert other.names == node.names, path
        assert other.device == node.device, path
        keys, other_keys = list(node.keys()), list(other.keys())
        assert (other_keys == keys) if order else (set(other_keys) == set(keys)), path
        for key, value in inner_of(node).items():
            if not isinstance(value, torch.Tensor) and (*path, key) not in nodes:
                assert_same_value(inner_of(other).get(key).data, value.data)


def inner_of(node: Any) -> Any:
    """The TensorDict inside a tensorclass, whose `get` gives entries as they are stored."""
    return node._tensordict if is_tensorclass(type(node)) else node


def assert_same_value(found: Any, value: Any) -> None:
    assert type(found) is type(value)
    if isinstance(value, np.ndarray):
        assert zoo.same_bits(found, value)
    else:
        assert found == value


def assert_aligned(tree: Any) -> None:
    for path, leaf in zoo.leaves(tree).items():
        assert leaf.data_ptr() % 64 == 0, path
        assert leaf.is_contiguous(), path


def assert_leaves_in_one_buffer(tree: Any) -> None:
    """All leaves lie in one storage, at the places of the layout, and stock calls it so."""
    assert tree.is_consolidated()
    leaves = zoo.leaves(tree)
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves.values()}) <= 1
    starts, _ = places({path: zoo.as_numpy(leaf) for path, leaf in leaves.items()})
    for path, leaf in leaves.items():
        assert leaf.storage_offset() * leaf.itemsize == starts[path], path
    assert_aligned(tree)


Seen = dict[Path, tuple[str, tuple[int, ...], bytes, int]]


def seen(tree: Any) -> Seen:
    """Per leaf: dtype, shape, bytes and misalignment. Runs in another process."""
    return {
        path: (str(leaf.dtype), tuple(leaf.shape), zoo.as_numpy(leaf).tobytes(), misaligned(leaf))
        for path, leaf in zoo.leaves(tree).items()
    }


def misaligned(leaf: torch.Tensor) -> int:
    return leaf.data_ptr() % 64


def expected_seen(arrays: dict[Path, np.ndarray]) -> Seen:
    return {
        path: (f"torch.{array.dtype.name}", array.shape, array.tobytes(), 0)
        for path, array in arrays.items()
    }


class Consolidated(Dataset[Any]):
    """Trees of the zoo, consolidated by the worker that reads them."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        return tdbridge.consolidate(zoo.TREES[self.names[index]]())


def only(batch: list[Any]) -> Any:
    """The collate function of a loader with batches of one."""
    (item,) = batch
    return item


def seen_nodes(tree: Any) -> dict[Path, Any]:
    """Per node: class, batch size, names, keys, and the text of the non-tensor entries."""
    found = {}
    for path, node in zoo.nodes(tree).items():
        entries = inner_of(node).items()
        others = {
            key: repr(value.data) for key, value in entries if isinstance(value, NonTensorData)
        }
        keys = sorted(node.keys())
        found[path] = (type(node).__name__, tuple(node.batch_size), node.names, keys, others)
    return found
