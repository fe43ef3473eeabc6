"""`collate` and `Rows` in the workers of a DataLoader, under each way to start them."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from tdbridge import LayoutError, consolidate, to_jax
from tdbridge.loaders import Rows, collate
from tests import zoo
from tests.layout.check import assert_leaves_in_one_buffer
from tests.loaders.datasets import CONTEXTS, Pair, Point, Samples, ShowsMemory, arrays

pytestmark = pytest.mark.filterwarnings(
    # pytest's process has threads of JAX, which a forked worker does not use.
    "ignore:os.fork\\(\\) was called:RuntimeWarning"
)


def load(dataset: Any, context: str, **more: Any) -> list[Any]:
    """All batches of two; a worker that hangs is an error."""
    assert jnp.ones(1).sum() == 1  # a fork takes place beside a backend that runs
    workers = 2 if context == "fork" else 1  # each takes seconds to start
    loader = DataLoader(
        dataset, batch_size=2, num_workers=workers, collate_fn=collate, timeout=120,
        multiprocessing_context=context, **more,
    )  # fmt: skip
    return list(loader)


def test_mappings():
    batches = load(Samples("mapping"), "fork")
    assert len(batches) == 3
    for k, batch in enumerate(batches):
        x, h, n = zip(*[arrays(i).values() for i in (2 * k, 2 * k + 1)], strict=True)
        assert zoo.same_bits(zoo.as_numpy(batch["x"]), np.stack(x))
        assert zoo.same_bits(zoo.as_numpy(batch["deep", "h"]), np.stack(h))
        assert zoo.same_bits(zoo.as_numpy(batch["deep", "n"]), np.stack(n))
        assert batch.get("text").tolist() == [f"sample {2 * k}", f"sample {2 * k + 1}"]


@pytest.mark.parametrize("context", CONTEXTS)
def test_what_the_main_process_gets_is_shared_with_jax(context):
    """One storage, aligned, consolidated and locked as in the worker; no copy on the way on."""
    for batch in load(Samples("tensorclass"), context):
        assert type(batch) is Point
        assert batch.batch_size == (2, 3)
        assert batch.label == "same"
        assert_leaves_in_one_buffer(batch)
        assert batch.is_locked
        shared = to_jax(batch, copy=False)
        assert shared.at.unsafe_buffer_pointer() == batch.at.data_ptr()
        (segment,) = to_jax(batch, packed=True).segments
        assert segment.unsafe_buffer_pointer() == batch.at.data_ptr()


def test_containers():
    for k, batch in enumerate(load(Samples("namedtuple"), "fork")):
        assert type(batch) is Pair
        assert batch.label.tolist() == [2 * k, 2 * k + 1]
        image, label = batch
        assert image.untyped_storage().data_ptr() == label.untyped_storage().data_ptr()
        assert image.data_ptr() % 64 == label.data_ptr() % 64 == 0


def test_the_buffer_is_shared_memory_from_the_start():
    """The worker says so; and collated again, the batch is the same one."""
    for batch in load(ShowsMemory("tensordict"), "fork"):
        assert batch.get("seen").data == (True, True)


@pytest.mark.parametrize(
    ("context", "how"),
    [
        ("fork", "plain"),
        ("fork", "consolidated"),
        ("fork", "memory-mapped"),
        ("fork", "in a file"),
        ("spawn", "memory-mapped"),
    ],
)
def test_rows(context, how, tmp_path):
    td = TensorDict(x=torch.arange(12.0).reshape(6, 2), n={"y": torch.arange(6)}, batch_size=[6])
    match how:
        case "consolidated":
            td = consolidate(td)
        case "memory-mapped":
            td = td.memmap(tmp_path)
        case "in a file":
            td = consolidate(td, filename=tmp_path / "file")
    batches = load(Rows(td), context)
    assert [batch["n", "y"].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    assert batches[1]["x"].tolist() == [[4.0, 5.0], [6.0, 7.0]]
    for batch in batches:
        assert_leaves_in_one_buffer(batch)


def test_rows_in_a_file_do_not_go_to_a_spawned_worker(tmp_path):
    """torch would raise `OSError: Bad file descriptor`, and what is to be done is not in it."""
    td = consolidate(zoo.flat(), filename=tmp_path / "file")
    with pytest.raises(LayoutError, match=r"'b'.*which torch cannot send to a spawned worker"):
        load(Rows(td), "spawn")


@pytest.mark.parametrize("name", ["lazy", "jagged", "values_per_element"])
def test_rows_of_other_kinds(name):
    tree = zoo.KINDS[name]()
    batches = load(Rows(tree), "fork")
    for k, batch in enumerate(batches):
        rows = torch.tensor([2 * k, 2 * k + 1])
        assert zoo.described(batch) == zoo.described(consolidate(tree[rows]))


def test_an_error_arrives_with_its_text():
    with pytest.raises(ValueError, match="sample 1 has a tensor of float32"):
        load([torch.ones(1), torch.ones(2)], "fork")
