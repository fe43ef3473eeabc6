"""The pickle in `.metadata`, read without running it.

torch writes the file with `pickle` and reads it with `pickle.load`, which runs whatever the file
asks for. Here every class that a normal file names is replaced by an inert record, made anew for
each file, and any other name is an error.
"""

import io
import pickle
from typing import Any

import torch

from tdbridge.errors import CheckpointError, UnsafeCheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *[(module, name) for module in ("pathlib", "pathlib._local") for name in (
        "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath",
    )],
}  # fmt: skip


def load_records(data: bytes) -> Any:
    """Unpickles the metadata of a DCP checkpoint into records, tuples and dtypes.

    Raises:
        UnsafeCheckpointError: it asks for anything else.
        CheckpointError: it is no pickle, or a damaged one.

    Example:
        >>> import os, pickle
        >>> load_records(pickle.dumps(os.system))
        Traceback (most recent call last):
        tdbridge.errors.UnsafeCheckpointError: asks for posix.system, which no checkpoint needs...
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except UnsafeCheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot be read: {error!r}") from error


class Record:
    """Stands for an object of the file: no behaviour, only the state it was pickled with."""

    state: Any = None

    def __init__(self, *args: Any) -> None:
        """Takes what the real class would be called with, and drops it."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._classes = {name: type(name[1], (Record,), {}) for name in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) in self._classes:
            return self._classes[module, name]
        raise UnsafeCheckpointError(
            f"asks for {module}.{name}, which no checkpoint needs. Nothing was run. "
            "Do not open this file with torch."
        )
