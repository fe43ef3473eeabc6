"""Epochs over a table in memory: `Loader` beside what others have for JAX.

A leaf has 16 float32 in each row, a batch 128 rows, shuffled; one call is an epoch, and each batch
is awaited. Workers are started before anything is timed.
"""

import gc
import statistics
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.case import Case, Contenders, Goal
from benchmarks.compare import flat_values
from benchmarks.suites import _loader_peers as peers
from tdbridge.loaders import Loader, Rows, collate

#: Batches in an epoch, by the number of leaves.
BATCHES = {3: 64, 30: 64, 300: 16}
WORKERS = (0, 2)


def cases(quick: bool) -> Iterable[Case]:
    """Return the cases; `quick` leaves out those of 300 leaves, and shortens the epochs."""
    _note_absent()
    sizes = {n: count // 4 if quick else count for n, count in BATCHES.items()}
    for leaves, batches in list(sizes.items())[: 2 if quick else None]:
        goal = _goals(1 if leaves < 30 else 0.5)
        for workers in WORKERS:
            for packed in (False, True):
                name = f"{'packed' if packed else 'leaves'}-{leaves}-workers-{workers}"
                build = partial(_loaders, leaves, batches, workers, packed=packed)
                yield Case(name, build, goal, unit="ms")
        yield Case(
            f"overlap-{leaves}", partial(_overlap, leaves, batches), Goal(1.15, "floor"), "ms"
        )


def _goals(ratio: float) -> tuple[Goal, ...]:
    optional = ["jax-dataloader"] if peers.HAS_JAX_DATALOADER else []
    return tuple(Goal(ratio, name) for name in ("recipe", "tensordict", *optional, "grain"))


def _note_absent() -> None:
    if not peers.HAS_JAX_DATALOADER:
        print("jax-dataloader is not installed, and does not compete.", file=sys.stderr)


def _table(leaves: int, batches: int) -> TensorDict:
    rows = batches * peers.BATCH
    td = TensorDict({key: torch.rand(rows, 16) for key in _keys(leaves)}, batch_size=[rows])
    td[_keys(leaves)[0]][:, 0] = torch.arange(rows)  # by which rows are told apart
    return td


def _keys(leaves: int) -> list[str]:
    return [f"x{i:03}" for i in range(leaves)]


def _loaders(leaves: int, batches: int, workers: int, *, packed: bool) -> Contenders:
    gc.collect()  # shared memory of the case before, which a forked worker would remove
    # JAX warns of each fork; no worker uses it.
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
    td = _table(leaves, batches)
    arrays: Any = {key: leaf.numpy() for key, leaf in td.items()}
    rivals = {
        "recipe": peers.recipe(arrays, workers),
        "tensordict": peers.tensordict(td, workers),
    }
    if peers.HAS_JAX_DATALOADER:
        rivals["jax-dataloader"] = peers.jax_dataloader(arrays, workers)
    # The last, for a forked worker that has inherited its shared memory removes it at the end.
    rivals["grain"] = peers.of_grain(arrays, workers)
    ours = _ours(td, workers, packed=packed)
    return Contenders(
        lambda: ours,
        {name: lambda rival=rival: rival for name, rival in rivals.items()},
        floor=lambda: [leaf.sum() for leaf in td.values()],
        ready=_drained,
        values=_rows,
        rest=0.5 if workers else 0.0,  # in which Grain fills its buffers
    )


def _ours(td: TensorDict, workers: int = 0, *, packed: bool = False) -> Loader:
    loader = peers.of_torch(Rows(td), workers, collate_fn=collate)
    return Loader(loader, to="jax", packed=packed)


def _drained(loader: Iterable[Any]) -> Iterable[Any]:
    for batch in loader:
        jax.block_until_ready(batch)
    return loader


def _rows(loader: Iterable[Any]) -> Mapping[str, np.ndarray]:
    """The rows of an epoch in the order of the table, whatever order they came in."""
    batches = [_by_key(batch) for batch in loader]
    whole = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    order = np.argsort(whole[min(whole)][:, 0])
    return {key: array[order] for key, array in whole.items()}


def _by_key(batch: Any) -> Mapping[str, np.ndarray]:
    bare = isinstance(batch, list | tuple)
    named = dict(zip(_keys(len(batch)), batch, strict=True)) if bare else batch
    return flat_values(named)


# --- overlap


def _overlap(leaves: int, batches: int) -> Contenders:
    """The step takes as long as loading; the floor is the steps alone."""
    ours = _ours(_table(leaves, batches))
    step = _seconds(ours) / batches
    return Contenders(
        lambda: peers.Epochs(lambda: _stepped(ours, step)),
        {"loading": lambda: ours},
        floor=lambda: peers.Epochs(lambda: _stepped(range(batches), step)),
        ready=_drained,
        values=_rows,
    )


def _seconds(loader: Iterable[Any]) -> float:
    """How long an epoch takes, the first one not counted."""
    _drained(loader)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        _drained(loader)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _stepped(batches: Iterable[Any], seconds: float) -> Iterator[Any]:
    for batch in batches:
        yield batch
        time.sleep(seconds)
