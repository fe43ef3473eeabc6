"""Each process loads its own part of a batch, and gets an array over all of them."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tensordict import TensorDict

from tdbridge import ArrayDict
from tdbridge.loaders import Loader
from tests.multiprocess.jobs import raised
from tests.multiprocess.pool import Pool

pytestmark = pytest.mark.xdist_group("multiprocess")

P = PartitionSpec
BATCHES, ROWS = 3, 4


def row_values(rank: int, batch: int) -> np.ndarray:
    start = 100 * rank + 10 * batch
    return np.arange(start, start + ROWS * 2, dtype=np.float32).reshape(ROWS, 2)


def source() -> list[TensorDict]:
    rank = jax.process_index()
    return [
        TensorDict(
            {"x": torch.from_numpy(row_values(rank, i)), "n": {"step": torch.full((ROWS,), i)}},
            [ROWS],
        )
        for i in range(BATCHES)
    ]


def sharded(spec: Any, per_process: int = 2) -> NamedSharding:
    """Over that many devices of each process."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    places = [[d for d in devices if d.process_index == r][:per_process] for r in range(2)]
    return NamedSharding(Mesh(np.concatenate(places), ("data",)), spec)


def local(array: Any) -> np.ndarray:
    """What this process has of an array that is cut along its first dimension."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def load(prefetch: int) -> list[Any]:
    loader = Loader(source(), to="jax", sharding=sharded(P("data")), prefetch=prefetch)
    total = jax.jit(lambda batch: batch["x"].sum())
    found = []
    for batch in loader:
        assert isinstance(batch, ArrayDict)
        here, step = local(batch["x"]), local(batch["n", "step"])
        found.append((batch.batch_size, batch["x"].shape, here, step, float(total(batch))))
    return found


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_batch_goes_over_all_processes(two: Pool, prefetch: int):
    for rank, found in enumerate(two.run(load, prefetch)):
        assert len(found) == BATCHES
        for i, (batch_size, shape, here, step, total) in enumerate(found):
            assert batch_size == (2 * ROWS,)
            assert shape == (2 * ROWS, 2)
            np.testing.assert_array_equal(here, row_values(rank, i))
            np.testing.assert_array_equal(step, np.full(ROWS, i))
            assert total == sum(row_values(r, i).sum() for r in range(2))


def load_by_tree() -> Any:
    where = {"x": sharded(P("data")), "n": sharded(P())}
    batch = next(iter(Loader(source(), to="jax", sharding=where)))
    return batch["x"].shape, batch["n", "step"].shape


def test_a_tree_of_shardings_says_what_is_cut(two: Pool):
    assert two.run(load_by_tree) == [((2 * ROWS, 2), (ROWS,))] * 2


def load_wrongly() -> tuple[str, str]:
    batch = {"x": torch.zeros(ROWS, 2), "count": torch.tensor(3)}
    cut = Loader([batch], to="jax", sharding=sharded(P("data")))
    packed = [TensorDict(x=torch.zeros(2), batch_size=[2])]
    return raised(next, iter(cut)), raised(
        Loader, packed, to="jax", sharding=sharded(P("data")), packed=True
    )


def test_what_cannot_be_cut_is_named(two: Pool):
    for cut, packed in two.run(load_wrongly):
        assert "count" in cut
        assert "packed" in packed
