"""`Rows` as a source of Grain, `collate` as its batch function: in one process and in workers."""

import multiprocessing
from typing import Any

import grain
import pytest
import torch
from absl import flags
from tensordict import TensorDict

from tdbridge import to_jax
from tdbridge.loaders import Rows, collate
from tests import zoo
from tests.layout.check import assert_leaves_in_one_buffer

COUNT = 12


def tree() -> TensorDict:
    leaves = {"x": torch.arange(COUNT * 3.0).reshape(COUNT, 3), "n": {"y": torch.arange(COUNT)}}
    return TensorDict(leaves, [COUNT])  # pyright: ignore[reportArgumentType]


def map_dataset(rows: Rows, workers: int) -> Any:
    data = grain.MapDataset.source(rows).shuffle(seed=3).batch(4, batch_fn=collate)
    options = grain.MultiprocessingOptions(num_workers=workers)
    return data.to_iter_dataset().mp_prefetch(options) if workers else data


def data_loader(rows: Rows, workers: int) -> Any:
    sampler = grain.samplers.IndexSampler(len(rows), shuffle=True, seed=3, num_epochs=1)
    operations = [grain.transforms.Batch(4, batch_fn=collate)]
    return grain.DataLoader(
        data_source=rows, sampler=sampler, operations=operations, worker_count=workers
    )


@pytest.fixture(params=["plain", "memory-mapped"])
def rows(request, tmp_path) -> Rows:
    return Rows(tree() if request.param == "plain" else tree().memmap(tmp_path))


def assert_each_row_once(batches: list[Any]) -> None:
    """Every row is in one batch, with its own values."""
    numbers = torch.cat([batch["n", "y"] for batch in batches])
    assert sorted(numbers.tolist()) == list(range(COUNT))
    expected = torch.stack([3.0 * numbers, 3.0 * numbers + 1, 3.0 * numbers + 2], 1)
    assert torch.equal(torch.cat([batch["x"] for batch in batches]), expected)


def test_it_is_a_source(rows):
    assert isinstance(rows, grain.sources.RandomAccessDataSource)


@pytest.mark.parametrize("make", [map_dataset, data_loader])
def test_batches_of_one_process(make, rows):
    batches = list(make(rows, 0))
    assert_each_row_once(batches)
    for batch in batches:
        assert type(batch) is TensorDict
        assert batch.batch_size == (4,)
        assert_leaves_in_one_buffer(batch)


@pytest.fixture
def workers(monkeypatch) -> int:
    """Grain reads a flag of absl when it starts workers; an application has parsed them."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    assert multiprocessing.parent_process() is None
    return 2


@pytest.mark.slow
@pytest.mark.parametrize("make", [map_dataset, data_loader])
def test_batches_of_workers(make, workers, tmp_path):
    """Grain takes a batch apart on its way; its leaves stay where they are, and collate sees it."""
    batches = list(make(Rows(tree().memmap(tmp_path)), workers))
    assert_each_row_once(batches)
    for batch in batches:
        assert type(batch) is TensorDict
        addresses = {path: leaf.data_ptr() for path, leaf in zoo.leaves(batch).items()}
        assert not batch.is_consolidated()
        again = collate(batch)
        assert again is batch
        assert_leaves_in_one_buffer(again)
        assert addresses == {path: leaf.data_ptr() for path, leaf in zoo.leaves(again).items()}
        assert to_jax(again["x"], copy=False).unsafe_buffer_pointer() == addresses["x",]


def test_a_state_goes_with_the_data_that_it_was_saved_of():
    iterator = iter(data_loader(Rows(tree()), 0))
    next(iterator)
    state = iterator.get_state()
    rest = [batch["n", "y"].tolist() for batch in iterator]
    again = iter(data_loader(Rows(tree()), 0))
    again.set_state(state)
    assert [batch["n", "y"].tolist() for batch in again] == rest
    other = iter(data_loader(Rows(tree().exclude("x")), 0))
    with pytest.raises(ValueError, match="data source in dataloader: Rows"):
        other.set_state(state)
