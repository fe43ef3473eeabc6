"""What a DCP directory holds and where: `.metadata`, checked before any of it is used."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch

from tdbridge.checkpoint.formats.dcp_pickle import Record, load_records
from tdbridge.checkpoint.sidecar import Path as KeyPath
from tdbridge.errors import CheckpointError, UnsafeCheckpointError

FILE = ".metadata"


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, or a whole byte item, and where its bytes lie."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Item:
    """One entry of the state dict; `dtype` is None for what is no tensor."""

    name: str
    path: KeyPath
    pieces: tuple[Piece, ...]
    dtype: torch.dtype | None = None
    size: tuple[int, ...] = field(default=())


def read_items(directory: Path) -> list[Item]:
    """Reads what a DCP directory holds and where, and checks it.

    Raises:
        UnsafeCheckpointError: the file asks for code, or points outside the directory.
        CheckpointError: the file is missing or damaged, or its chunks do not make up a tensor.
    """
    file = directory / FILE
    try:
        items = list(_items(load_records(file.read_bytes())))
        if len({item.path for item in items}) < len(items):
            raise CheckpointError("two items have the same path.")
        return items
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    except CheckpointError as error:
        raise type(error)(f"{file}: {error}") from None


def _items(metadata: Any) -> Iterator[Item]:
    entries = _get(metadata, "state_dict_metadata", dict)
    paths = _get(metadata, "planner_data", dict | None) or {}
    stored = _stored(_get(metadata, "storage_data", dict))
    for name, entry in entries.items():
        path = paths.get(name, (name,))
        keys = (name, *path) if isinstance(path, tuple) and path else (None,)
        if type(name) is not str or not all(type(key) in (str, int) for key in keys):
            raise CheckpointError(f"{name!r}: got the malformed path {path!r}.")
        if type(entry).__name__ == "BytesStorageMetadata":
            yield Item(name, path, (_piece(name, None, (), stored),))
        else:
            yield _tensor(name, path, entry, stored)


def _stored(storage_data: dict[Any, Any]) -> dict[tuple[str, Any], Any]:
    """Where things are, by name and offsets: the offsets are missing for byte items."""
    found = {}
    for index, info in storage_data.items():
        offset = _get(index, "offset", tuple | None)
        key = _get(index, "fqn", str), offset and _dims(index, "offset")
        found[key] = info
    return found


def _tensor(name: str, path: KeyPath, entry: Any, stored: dict[tuple[str, Any], Any]) -> Item:
    properties = getattr(_get(entry, "properties", Record), "state", None)
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r}: expected a dtype, got {dtype!r}.")
    size = _dims(entry, "size")
    boxes = [(_dims(c, "offsets"), _dims(c, "sizes")) for c in _get(entry, "chunks", list)]
    _check_cover(name, size, boxes)
    pieces = tuple(_piece(name, offsets, sizes, stored) for offsets, sizes in boxes)
    if any(math.prod(p.sizes) * dtype.itemsize > p.length for p in pieces):
        raise CheckpointError(f"{name!r}: the stored bytes are fewer than its shape {size} needs.")
    return Item(name, path, pieces, dtype, size)


def _piece(
    name: str, offsets: tuple[int, ...] | None, sizes: tuple[int, ...], stored: dict[Any, Any]
) -> Piece:
    info = stored.get((name, offsets))
    if info is None:
        raise CheckpointError(f"{name!r}: nothing is said about where its bytes are.")
    if _get(info, "transform_descriptors", list | tuple | None):
        raise CheckpointError(f"{name!r}: stored with a stream transform, which is not supported.")
    file, start = _get(info, "relative_path", str), _get(info, "offset", int)
    length = _get(info, "length", int)
    if start < 0 or length < 0:
        raise CheckpointError(f"{name!r}: got offset {start} and length {length}.")
    return Piece(offsets or (), sizes, _inside(name, file), start, length)


def _inside(name: str, file: str) -> str:
    path = PurePosixPath(file)
    if path.is_absolute() or PureWindowsPath(file).anchor or ".." in path.parts or "\0" in file:
        raise UnsafeCheckpointError(f"{name!r}: points to {file!r}, outside the checkpoint.")
    return file


def _check_cover(
    name: str, size: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Checks that the boxes fill the tensor once: torch leaves gaps uninitialised, silently."""
    if any(len(offsets) != len(size) or len(sizes) != len(size) for offsets, sizes in boxes):
        raise CheckpointError(f"{name!r}: a chunk has not the {len(size)} dimensions of its shape.")
    boxes = [box for box in boxes if math.prod(box[1])]
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(size):
        raise CheckpointError(f"{name!r}: its chunks do not cover its shape {size} exactly.")
    starts = np.array([box[0] for box in boxes], dtype=object).reshape(len(boxes), len(size))
    stops = starts + np.array([box[1] for box in boxes], dtype=object).reshape(starts.shape)
    if (stops > np.array(size, dtype=object)).any():
        raise CheckpointError(f"{name!r}: a chunk reaches beyond its shape {size}.")
    for i in range(len(boxes) - 1):
        meet = (starts[i] < stops[i + 1 :]) & (starts[i + 1 :] < stops[i])
        if meet.all(axis=1).any():
            raise CheckpointError(f"{name!r}: its chunks overlap.")


def _dims(record: Any, key: str) -> tuple[int, ...]:
    dims = _get(record, key, tuple)
    if not all(type(dim) is int and dim >= 0 for dim in dims):
        raise CheckpointError(f"expected sizes as {key!r}, got {dims!r}.")
    return dims


def _get(record: Any, key: str, kind: Any) -> Any:
    state = getattr(record, "state", None)
    value = state.get(key) if isinstance(state, dict) else None
    if not isinstance(value, kind):
        raise CheckpointError(f"expected {key!r} in {type(record).__name__}, got {value!r}.")
    return value
