"""torch.distributed.checkpoint: written by torch itself, read with nothing executed."""

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from tdbridge.checkpoint.formats.dcp_metadata import FILE, Item, Piece, read_items
from tdbridge.checkpoint.leaves import as_tensor, is_scalar
from tdbridge.checkpoint.sidecar import Path as KeyPath
from tdbridge.errors import CheckpointError, UnsafeCheckpointError


def is_at(directory: Path) -> bool:
    """Whether torch has finished a checkpoint here: it writes `.metadata` last."""
    return (directory / FILE).is_file()


def encode(leaf: Any, where: str) -> Any:
    """Gives a leaf as DCP takes it: a tensor, sharing memory where possible, or a scalar."""
    return leaf if is_scalar(leaf) else as_tensor(leaf, where)


def write(directory: Path, tree: dict[str, Any]) -> None:
    """Writes nested dicts and lists of tensors and scalars with `dcp.save`.

    Raises:
        CheckpointError: torch could not write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    # Files are synced when the directory is committed.
    writer = FileSystemWriter(directory, sync_files=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(tree, storage_writer=writer, no_dist=True)
    except CheckpointException as error:  # a BaseException, which hides what was raised
        cause = next(iter(error.failures.values()), (error, None))[0]
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        raise CheckpointError(f"torch could not write the checkpoint: {cause!r}") from error
    except Exception as error:
        raise CheckpointError(f"torch could not write the checkpoint: {error!r}") from error


def read(directory: Path) -> dict[KeyPath, Any]:
    """Reads every item into memory: tensors on the CPU, and what else there is.

    Raises:
        UnsafeCheckpointError: something in the checkpoint asks for code.
        CheckpointError: a file is missing, cut short or damaged; the message names it.
    """
    return {item.path: _read_item(directory, item) for item in read_items(directory)}


def _read_item(directory: Path, item: Item) -> Any:
    if item.dtype is None:
        return _load(directory, item, item.pieces[0])
    parts = [_load_part(directory, item, piece) for piece in item.pieces]
    if len(parts) == 1:
        return parts[0]
    whole = torch.empty(item.size, dtype=item.dtype)
    for piece, part in zip(item.pieces, parts, strict=True):
        box = [slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True)]
        whole[tuple(box)] = part
    return whole


def _load_part(directory: Path, item: Item, piece: Piece) -> torch.Tensor:
    part = _load(directory, item, piece)
    found = (part.dtype, tuple(part.shape)) if isinstance(part, torch.Tensor) else type(part)
    if found != (item.dtype, piece.sizes):
        raise CheckpointError(
            f"{directory / piece.file}: {item.name!r} should be {item.dtype} of shape "
            f"{piece.sizes}, got {found}."
        )
    return part.detach()


def _load(directory: Path, item: Item, piece: Piece) -> Any:
    file = directory / piece.file
    data = _read_bytes(file, item, piece)
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        _refuse_code(data, f"{file}: {item.name!r}")
        raise CheckpointError(f"{file}: {item.name!r} cannot be read: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{file}: {item.name!r} cannot be read: {error}") from error


def _read_bytes(file: Path, item: Item, piece: Piece) -> bytes:
    try:
        with file.open("rb") as stream:
            stream.seek(piece.start)
            data = stream.read(piece.length)
    except (OSError, OverflowError) as error:
        raise CheckpointError(f"{file}: {item.name!r} cannot be read: {error}") from error
    if len(data) != piece.length:
        raise CheckpointError(
            f"{file}: ends before {item.name!r} does: got {len(data)} of {piece.length} bytes. "
            "The file was cut short."
        )
    return data


def _refuse_code(data: bytes, where: str) -> None:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:  # noqa: BLE001 - too damaged to say; the caller raises
        return
    if names:
        raise UnsafeCheckpointError(
            f"{where} asks for {', '.join(sorted(names))}, which loading must not run. "
            "Nothing was run. Do not open this checkpoint with torch."
        )
