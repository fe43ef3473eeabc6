"""A state is that behind the last batch received, and another process goes on from it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import tdbridge
from tdbridge.errors import LoaderError
from tdbridge.loaders import Loader
from tests.loaders.resumable import EPOCHS, KINDS, PER_EPOCH, Numbers, batches, generator, rest

pytestmark = [
    # What torchdata calls is deprecated by torch; JAX warns of each fork of a process that has it;
    # torch's checkpoints warn of a single process.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:.*os.fork\\(\\) was called"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
PROGRAM = Path(__file__).with_name("resumable.py")
ROOT = PROGRAM.parents[2]
Ask = Callable[[str, dict[str, Any]], list[list[int]]]


@pytest.fixture(scope="module")
def in_new_process() -> Iterator[Ask]:
    """`rest`, in a process that has not seen the loaders whose states it is given."""
    process = subprocess.Popen(
        [sys.executable, PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )

    def ask(kind: str, state: dict[str, Any]) -> list[list[int]]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([kind, state]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.communicate()


def stopped(kind: str, prefetch: int) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """All batches of a run, and the state before each and after the last one."""
    loader = Loader(KINDS[kind](), prefetch=prefetch)
    states, whole = [loader.state_dict()], []
    for batch in batches(loader):
        whole.append(batch)
        states.append(loader.state_dict())
    assert len(whole) == EPOCHS * PER_EPOCH
    return states, whole


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_is_that_of_the_uninterrupted_run(kind: str, in_new_process: Ask):
    states, whole = stopped(kind, 2)
    for k, state in enumerate(states):
        assert in_new_process(kind, state) == whole[k:], f"after {k} batches"


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("kind", ["list", "plain", "stateful", "stateful-workers", "grain-iter"])
def test_what_was_prefetched_does_not_count(kind: str, prefetch: int, in_new_process: Ask):
    states, whole = stopped(kind, prefetch)
    for k in (PER_EPOCH - 1, PER_EPOCH):
        assert in_new_process(kind, states[k]) == whole[k:], f"after {k} batches"


@pytest.mark.parametrize("kind", ["list", "plain", "stateful", "stateful-stream", "grain-map"])
def test_a_state_between_two_epochs_begins_with_the_next_one(kind: str):
    loader = Loader(KINDS[kind]())
    first = [torch.as_tensor(batch).tolist() for batch in loader]
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 0)
    later = list(batches(loader))
    assert rest(kind, state) == later
    assert len(later) == (EPOCHS - 1) * PER_EPOCH
    assert len(first) == PER_EPOCH


def test_a_state_of_the_last_batch_ends_its_epoch_first():
    loader = Loader(KINDS["stateful"]())
    state = [loader.state_dict() for _ in loader][-1]
    assert (state["epoch"], state["batch"]) == (0, PER_EPOCH)
    again = Loader(KINDS["stateful"]())
    again.load_state_dict(state)
    assert list(again) == []
    assert len(list(again)) == PER_EPOCH


def test_a_state_goes_back_in_the_same_process():
    loader = Loader(KINDS["plain"]())
    found = iter(loader)
    next(found)
    state = loader.state_dict()
    expected = [batch.tolist() for batch in found]
    assert len(expected) == PER_EPOCH - 1
    for _ in range(2):
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == expected


def test_loading_ends_the_iteration_that_runs():
    loader = Loader([torch.tensor([i]) for i in range(4)])
    found = iter(loader)
    next(found)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(LoaderError, match="by load_state_dict"):
        next(found)
    assert [int(batch) for batch in loader] == [1, 2, 3]


# --- what a state is


class Million(Dataset[int]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_a_state_of_a_million_rows_is_small(workers: int, shared: bool):
    own = generator(0) if shared else None
    source = StatefulDataLoader(Million(), 128, shuffle=True, num_workers=workers, generator=own)
    loader = Loader(source)
    next(iter(loader))
    assert len(json.dumps(loader.state_dict())) < 20_000


def by_json(state: Any, _: Path) -> Any:
    return json.loads(json.dumps(state))


def by_torch(state: Any, path: Path) -> Any:
    torch.save(state, path / "state.pt")
    return torch.load(path / "state.pt", weights_only=True)


def by_dcp(state: Any, path: Path) -> Any:
    dcp.save({"loader": state}, checkpoint_id=path)  # pyright: ignore[reportPrivateImportUsage]
    found = {"loader": Loader([]).state_dict()}  # as a new loader has it, before it loads
    dcp.load(found, checkpoint_id=path)  # pyright: ignore[reportPrivateImportUsage]
    return found["loader"]


def by_orbax(state: Any, path: Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path / "state", {"loader": state, "w": np.ones(3)})
        return checkpointer.restore(path / "state")["loader"]


def by_tdbridge(fmt: Any) -> Any:
    def save(state: Any, path: Path) -> Any:
        tdbridge.checkpoint.save(path / "c", {"loader": state, "w": torch.ones(3)}, format=fmt)
        return tdbridge.checkpoint.load(path / "c")["loader"]

    return save


@pytest.mark.parametrize(
    "store", [by_json, by_torch, by_dcp, by_orbax, by_tdbridge("dcp"), by_tdbridge("orbax")]
)
def test_a_state_can_be_stored_with_a_checkpoint(store: Any, tmp_path: Path):
    loader = Loader(KINDS["stateful"]())
    whole = batches(loader)
    for _ in range(6):
        next(whole)
    assert rest("stateful", store(loader.state_dict(), tmp_path)) == list(whole)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: [], "a state that Loader.state_dict() gave, got list"),
        (lambda state: {"epoch": 1}, "a state that Loader.state_dict() gave, got ['epoch']"),
        (lambda state: state | {"source": "AAAA"}, "the state is damaged"),
        (lambda state: state | {"source": None}, "the state is damaged"),
        (lambda state: state | {"source": state["source"][:40]}, "the state is damaged"),
        (lambda state: state | {"epoch": "one"}, "the state is damaged"),
        (lambda state: state | {"batch": -1}, "the state is damaged"),
    ],
)
def test_what_is_no_state_is_refused(change: Any, text: str):
    loader = Loader(KINDS["stateful"]())
    next(iter(loader))
    with pytest.raises(LoaderError) as error:
        loader.load_state_dict(change(loader.state_dict()))
    assert text in str(error.value)


def test_a_state_of_another_source_is_refused():
    loader = Loader([torch.tensor([i]) for i in range(4)])
    list(islice(loader, 3))
    state = loader.state_dict()
    shorter = Loader([torch.tensor([1])])
    shorter.load_state_dict(state)
    with pytest.raises(LoaderError, match="ended after 1 batches, and 3 were received"):
        iter(shorter)
    shuffled = Loader(KINDS["plain"]())
    with pytest.raises(LoaderError, match="0 generators, and the loader and its samplers have 1"):
        shuffled.load_state_dict(state)
    for kind in ("stateful", "grain-map"):
        with pytest.raises(LoaderError, match="of another kind of source"):
            Loader(KINDS[kind]()).load_state_dict(state)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"shuffle": True}, r"generator=torch\.Generator"),
        ({"num_workers": 2, "in_order": False}, "Leave out in_order=False"),
        (
            {
                "shuffle": True,
                "generator": generator(1),
                "num_workers": 1,
                "persistent_workers": True,
            },
            "the seed of persistent workers",
        ),
    ],
)
def test_an_order_that_cannot_come_again_has_no_state(given: Any, text: str):
    loader = Loader(DataLoader(Numbers(), 4, **given))
    assert len(list(loader)) == 5
    with pytest.raises(LoaderError, match=text):
        loader.state_dict()


class Opaque:
    """A source whose state is no plain data."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.ones(1)

    def state_dict(self) -> dict[str, Any]:
        return {"where": object()}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_a_state_that_is_no_plain_data_is_refused():
    loader = Loader(Opaque())
    next(iter(loader))
    with pytest.raises(LoaderError, match="value of type object"):
        loader.state_dict()


class Reused:
    """A source that writes into the one dict that it gives as its state."""

    def __init__(self) -> None:
        self.state = {"given": np.zeros((), np.int64)}

    def __iter__(self) -> Iterator[torch.Tensor]:
        first = int(self.state["given"])
        for i in range(first, 4):
            self.state["given"] += 1
            yield torch.tensor([i])

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = {"given": state["given"].copy()}


def test_a_state_that_the_source_writes_over_is_kept():
    loader = Loader(Reused(), prefetch=3)
    found = iter(loader)
    assert int(next(found)) == 0
    other = Loader(Reused())
    other.load_state_dict(loader.state_dict())
    assert [int(batch) for batch in other] == [1, 2, 3]


def test_a_tensordict_batch_is_resumed_too():
    data = [TensorDict(x=torch.arange(2) + i, batch_size=[2]) for i in range(4)]
    loader = Loader(data, to="jax")
    next(iter(loader))
    again = Loader([*data], to="jax")
    again.load_state_dict(loader.state_dict())
    assert [int(batch["x"][0]) for batch in again] == [1, 2, 3]
