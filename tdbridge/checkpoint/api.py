"""save and load: one directory in the format of a real engine, read without running anything."""

import os
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax
import torch

from tdbridge.checkpoint.commit import written_beside
from tdbridge.checkpoint.formats import dcp, orbax
from tdbridge.checkpoint.names import check_names, flatten, nest, show
from tdbridge.checkpoint.restore import restore
from tdbridge.checkpoint.sidecar import read_nodes, write_nodes
from tdbridge.errors import CheckpointError

Format = Literal["dcp", "orbax"]
Framework = Literal["torch", "jax", "numpy"]

_FORMATS: dict[Format, ModuleType] = {"dcp": dcp, "orbax": orbax}
_FRAMEWORKS = ("torch", "jax", "numpy")


def save(
    path: str | os.PathLike[str], tree: Any, *, format: Format = "dcp", overwrite: bool = False
) -> None:
    """Writes a tree of tensors into a directory that the engine of `format` reads by itself.

    A checkpoint is complete or not there: it is written beside `path`, synced, and renamed. A file
    `tdbridge.json` beside the engine's files holds what the engine cannot: batch sizes, names,
    tuples, empty containers.

    Args:
        path: the directory to make. Missing parents are made too.
        tree: a TensorDict, tensorclass, ArrayDict or dict with string keys; inside it also lists
            and tuples. Leaves are torch tensors, JAX and numpy arrays of any dtype that the engine
            has, and bool, int, float, str and None. Tensors on the CPU are not copied where they
            are C-contiguous. Device, `requires_grad` and memory-mapping are not kept.
        format: `"dcp"` for `torch.distributed.checkpoint.load`; `"orbax"` for Orbax v1's `load`
            and, at `path/state`, v0's `StandardCheckpointer`.
        overwrite: replace the checkpoint at `path`; it stays until the new one is complete. What is
            no checkpoint is never replaced.

    Raises:
        CheckpointError: before anything is written: `path` exists, two leaves have one name, a leaf
            or container cannot be held (the message names it), or more than one process takes
            part; later: the engine or the disk failed.

    Example:
        >>> import tempfile, torch
        >>> from tensordict import TensorDict
        >>> place = tempfile.mkdtemp() + "/step-1"
        >>> save(place, TensorDict({"obs": torch.ones(4, 3)}, batch_size=[4]))
        >>> load(place).batch_size
        torch.Size([4])
    """
    engine = _FORMATS.get(format)
    if engine is None:
        raise ValueError(f"expected a format of {list(_FORMATS)}, got {format!r}.")
    _refuse_several_processes()
    target = Path(path).resolve()
    leaves, nodes = flatten(tree)
    encoded = {key: _encoded(engine, leaf, key) for key, leaf in leaves.items()}
    _check_root(leaves)
    check_names(leaves)
    _check_target(target, overwrite)
    try:
        with written_beside(target) as new:
            engine.write(new, nest(encoded))
            write_nodes(new, nodes)
    except CheckpointError as error:
        raise CheckpointError(f"{target}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}") from error


def load(path: str | os.PathLike[str], *, to: Framework = "torch") -> Any:
    """Reads a checkpoint that `save`, DCP or Orbax wrote, whole, without a target.

    Nothing in the checkpoint is executed, whoever wrote it. Where there is no `tdbridge.json`,
    batch sizes are empty and sequences are lists.

    Args:
        path: the directory. Its format is detected.
        to: the kind of tree to give back. `"torch"`: a nested TensorDict on the CPU; `"jax"`: an
            ArrayDict, as `to_jax` makes it; `"numpy"`: nested dicts of numpy arrays, with ml_dtypes
            for bfloat16 and float8. A tree that holds lists or tuples keeps its plain containers,
            with a TensorDict or ArrayDict where one was saved. A tensorclass comes back as the
            TensorDict it is made of.

    Returns:
        The tree. Its memory is its own.

    Raises:
        UnsafeCheckpointError: the checkpoint asks for code to be run, or for a file outside it.
        CheckpointError: nothing that can be read is there; a file is missing or damaged, named in
            the message; the chunks of a tensor do not cover it; the framework lacks a dtype.
        NarrowingError: `to="jax"` without x64, and a 64-bit leaf would lose values.

    Example:
        >>> import tempfile, numpy as np
        >>> place = tempfile.mkdtemp() + "/run"
        >>> save(place, {"w": np.arange(3), "step": 7}, format="orbax")
        >>> load(place, to="numpy")
        {'step': 7, 'w': array([0, 1, 2])}
    """
    if to not in _FRAMEWORKS:
        raise ValueError(f"expected to= one of {list(_FRAMEWORKS)}, got {to!r}.")
    directory = Path(path).resolve()
    engine = _FORMATS[detect(directory)]
    leaves = engine.read(directory)
    nodes = read_nodes(directory)
    try:
        return restore(leaves, nodes, to)
    except (CheckpointError, RecursionError) as error:
        raise CheckpointError(f"{directory}: {error}") from error


def detect(path: str | os.PathLike[str]) -> Format:
    """Names the format of the checkpoint at `path`.

    Raises:
        CheckpointError: no finished checkpoint of a known format is there.
    """
    directory = Path(path)
    for name, engine in _FORMATS.items():
        if engine.is_at(directory):
            return name
    found = "holds neither .metadata (DCP) nor _METADATA (Orbax)"
    raise CheckpointError(
        f"{directory}: {found if directory.exists() else 'does not exist'}, so no finished "
        "checkpoint is here. Check the path, or save again."
    )


def _encoded(engine: ModuleType, leaf: Any, path: tuple[str | int, ...]) -> Any:
    # An empty container stands among the leaves; the engines take it as it is.
    return leaf if type(leaf) in (dict, list) else engine.encode(leaf, show(path))


def _check_root(leaves: dict[tuple[str | int, ...], Any]) -> None:
    if not leaves or any(not path or type(path[0]) is not str for path in leaves):
        raise CheckpointError(
            "the root has to be a TensorDict, an ArrayDict or a dict that is not empty. "
            'Put it under a key: {"tree": tree}.'
        )


def _check_target(path: Path, overwrite: bool) -> None:
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise CheckpointError(f"{path}: exists. Choose another path, or pass overwrite=True.")
    is_empty = path.is_dir() and not any(path.iterdir())
    if not is_empty and not any(engine.is_at(path) for engine in _FORMATS.values()):
        raise CheckpointError(
            f"{path}: exists and is no finished checkpoint, so it is not replaced even with "
            "overwrite=True. Remove it yourself."
        )


def _refuse_several_processes() -> None:
    dist = torch.distributed
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    # Asked first, because `process_count` starts JAX's backends.
    count = jax.process_count() if jax.distributed.is_initialized() else 1
    if max(ranks, count) > 1:
        raise CheckpointError(
            f"got {max(ranks, count)} processes, and save writes from one only. Use "
            "torch.distributed.checkpoint or Orbax directly, or gather the tree and save it after "
            "the process group is destroyed."
        )
