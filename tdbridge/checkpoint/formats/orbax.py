"""Orbax: written by Orbax itself, read with tensorstore so that JAX cannot narrow anything.

Orbax gives JAX arrays back for leaves that were JAX arrays, and JAX makes float32 of their float64
without a word. Reading the same files with tensorstore gives numpy arrays, of any dtype, on any
machine.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tdbridge.checkpoint.leaves import as_array, is_scalar
from tdbridge.checkpoint.names import join
from tdbridge.checkpoint.sidecar import Path as KeyPath
from tdbridge.checkpoint.sidecar import read_json
from tdbridge.errors import CheckpointError, UnsafeCheckpointError

_METADATA = "_METADATA"
_STRINGS = "_strings.json"
# Where the tree lies: Orbax v0 alone, v1, earlier v1, v0's CheckpointManager.
_PLACES = ("", "state", "pytree", "default")
_REFUSED = {"uint2", "uint4", "float8_e4m3"}
_EMPTY = {"None": None, "Dict": {}, "List": [], "Tuple": []}
_ARRAYS = {"jax.Array", "np.ndarray", "scalar"}


def is_at(directory: Path) -> bool:
    """Whether Orbax has finished a checkpoint here."""
    return any((directory / place / _METADATA).is_file() for place in _PLACES)


def encode(leaf: Any, where: str) -> Any:
    """Gives a leaf as Orbax takes it: a numpy array, sharing memory where possible, or a scalar.

    Raises:
        CheckpointError: a leaf that Orbax refuses.
    """
    if is_scalar(leaf):
        if type(leaf) is int and not -(2**63) <= leaf < 2**63:
            raise CheckpointError(f"{where}: got {leaf}, and Orbax holds 64-bit integers only.")
        return leaf
    array = as_array(leaf, where)
    if array.size == 0:
        raise CheckpointError(
            f'{where}: got the empty shape {array.shape}, which Orbax refuses. Use format="dcp".'
        )
    if array.dtype.name in _REFUSED:
        raise CheckpointError(f"{where}: got dtype {array.dtype.name}, which Orbax refuses.")
    return array


def write(directory: Path, tree: dict[str, Any]) -> None:
    """Writes nested dicts and lists of numpy arrays and scalars with Orbax v1's `save`.

    Raises:
        CheckpointError: Orbax could not write.
    """
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    # Orbax copies every array first, so that a caller may go on; here the caller waits.
    context.memory.deepcopy_host_arrays = False
    try:
        with context:
            ocp.save(str(directory), tree)
    except Exception as error:
        raise CheckpointError(f"Orbax could not write the checkpoint: {error!r}") from error


def read(directory: Path) -> dict[KeyPath, Any]:
    """Reads every leaf into memory: numpy arrays and scalars. Nothing in these files is code.

    Raises:
        UnsafeCheckpointError: a name leads outside the directory.
        CheckpointError: a file is missing, cut short or damaged; the message names it.
    """
    base = _base(directory)
    metadata = read_json(base / _METADATA)
    try:
        entries = metadata["tree_metadata"].values()
        kinds = {_path(e["key_metadata"]): e["value_metadata"]["value_type"] for e in entries}
        format_ = (bool(metadata.get("use_ocdbt", True)), bool(metadata.get("use_zarr3", False)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{base / _METADATA}: is malformed: {error!r}") from error
    arrays = [path for path, kind in kinds.items() if kind in _ARRAYS]
    return {
        **{path: _other(base, path, kind) for path, kind in kinds.items() if kind not in _ARRAYS},
        **_read_arrays(base, arrays, kinds, *format_),
    }


def _base(directory: Path) -> Path:
    if ".orbax-checkpoint-tmp" in directory.name:
        raise CheckpointError(f"{directory}: was never finished: it is Orbax's working directory.")
    return next(p for p in map(directory.joinpath, _PLACES) if (p / _METADATA).is_file())


def _path(keys: Iterable[Mapping[str, Any]]) -> KeyPath:
    """Key type 1 is a position in a sequence, 2 a key of a dict."""
    return tuple(int(k["key"]) if k["key_type"] == 1 else str(k["key"]) for k in keys)


def _other(base: Path, path: KeyPath, kind: str) -> Any:
    if kind in _EMPTY:
        return _EMPTY[kind]
    if kind != "string":
        raise CheckpointError(f"{base}: {join(path)!r} is a {kind!r}, which is not supported.")
    text = read_json(base / _STRINGS).get(join(path))
    if not isinstance(text, str):
        raise CheckpointError(f"{base / _STRINGS}: has no string {join(path)!r}.")
    return text


def _read_arrays(
    base: Path, paths: list[KeyPath], kinds: Mapping[KeyPath, str], ocdbt: bool, zarr3: bool
) -> dict[KeyPath, Any]:
    import tensorstore as ts

    context = ts.Context()
    # All are opened before the first is waited for: opening reads the disk too.
    opening = [
        ts.open(_spec(base, join(path), ocdbt, zarr3), read=True, open=True, context=context)
        for path in paths
    ]
    return {
        path: _value(base, path, store, kinds[path])
        for path, store in zip(paths, opening, strict=True)
    }


def _spec(base: Path, name: str, ocdbt: bool, zarr3: bool) -> dict[str, Any]:
    files = {"driver": "file", "path": f"{base}/"}
    if ocdbt:
        kvstore = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
    elif ".." in re.split(r"[/\\]", name) or name.startswith("/"):
        raise UnsafeCheckpointError(f"{base}: the leaf {name!r} lies outside the checkpoint.")
    else:
        kvstore = {"driver": "file", "path": f"{base}/{name}/"}
    return {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": kvstore,
        # A chunk that is missing is an error, not a block of zeros.
        "fill_missing_data_reads": False,
    }


def _value(base: Path, path: KeyPath, opening: Any, kind: str) -> Any:
    try:
        array = np.asarray(opening.result().read().result())
    except Exception as error:
        raise CheckpointError(f"{base}: {join(path)!r} cannot be read: {error}") from error
    return array.item() if kind == "scalar" else array
