"""Workers that raise or die, loops that are left early, and that nothing is left behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import psutil
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tdbridge.errors import WorkerError
from tdbridge.loaders import Loader, Rows, collate

pytestmark = [
    # JAX warns of each fork of a process that has it; torchdata calls what torch deprecates.
    pytest.mark.filterwarnings("ignore:.*os.fork\\(\\) was called"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
SHARED_MEMORY = Path("/dev/shm")


class Numbers(Dataset[TensorDict]):
    """Row `at` does what `what` says."""

    def __init__(self, at: int = -1, what: Callable[[], Any] | None = None) -> None:
        self.at, self.what = at, what

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> TensorDict:
        if index == self.at and self.what is not None:
            self.what()
        return TensorDict(x=torch.tensor([index]))


def boom() -> None:
    raise ValueError("row 20 is damaged")


def die() -> None:
    time.sleep(0.5)  # the batches before are on their way
    os.kill(os.getpid(), signal.SIGKILL)


def use_jax() -> None:
    jnp.ones((3, 7))


MAKERS: dict[str, Any] = {
    "plain": DataLoader,
    "stateful": StatefulDataLoader,
}


def make(kind: str, dataset: Any, **given: Any) -> Any:
    given = {"num_workers": 2, "collate_fn": collate} | given
    return MAKERS[kind](dataset, batch_size=4, **given)


OTHERS: set[int] = set()
"""The processes of other tests: pools that stay warm."""


def children() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    # What multiprocessing starts once for a process, and ends with it.
    own = [p for p in found if p.pid not in OTHERS]
    return [p for p in own if "resource_tracker" not in " ".join(p.cmdline())]


def shared_files() -> set[str]:
    return {entry.name for entry in SHARED_MEMORY.iterdir() if entry.name.startswith("torch_")}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()
    OTHERS.update(process.pid for process in children())
    before = {thread.name for thread in threading.enumerate()}, shared_files()
    yield
    deadline = time.monotonic() + 20
    while True:  # a feeder thread of multiprocessing ends a moment after its queue
        gc.collect()  # the exceptions that pytest keeps
        found = {thread.name for thread in threading.enumerate()}, shared_files()
        if not children() and all(now <= then for now, then in zip(found, before, strict=True)):
            return
        assert time.monotonic() < deadline, (children(), found, before)
        time.sleep(0.01)


def received(loader: Loader) -> Iterator[int]:
    for batch in loader:
        yield int(batch["x"][0, 0])


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_comes_at_its_batch(kind: str, workers: int, prefetch: int):
    source = make(kind, Numbers(20, boom), num_workers=workers)
    loader = Loader(source, to="jax", prefetch=prefetch)
    found = []
    with pytest.raises(ValueError, match="row 20 is damaged") as error:
        found.extend(received(loader))
    assert found == [0, 4, 8, 12, 16]
    assert loader.state_dict()["batch"] == 5
    text = str(error.value) + "".join(str(entry) for entry in error.traceback)
    assert "boom" in text


@pytest.mark.parametrize("kind", MAKERS)
def test_a_killed_worker_is_an_error_at_its_batch(kind: str):
    loader = Loader(make(kind, Numbers(20, die)), to="jax")
    found = []
    with pytest.raises((RuntimeError, OSError, EOFError)):
        found.extend(received(loader))
    # Batch 5 is lost, and with it what the same worker had sent and nobody had opened.
    assert found == [0, 4, 8, 12, 16][: len(found)]
    assert len(found) >= 2


def whose_thread() -> None:
    name = threading.current_thread().name
    raise RuntimeError(f"forked by {name}")


@pytest.mark.parametrize("kind", MAKERS)
def test_workers_are_forked_by_the_thread_that_asks(kind: str):
    """In the child of another thread, a process group of torch would wait for its own for ever."""
    loader = Loader(make(kind, Numbers(0, whose_thread)))
    with pytest.raises(RuntimeError, match=f"forked by {threading.current_thread().name}"):
        list(loader)


@pytest.mark.parametrize("kind", MAKERS)
def test_jax_in_a_worker_is_an_error(kind: str):
    loader = Loader(make(kind, Numbers(20, use_jax), collate_fn=torch.stack))
    with pytest.raises(WorkerError, match="JAX was used in DataLoader worker"):
        list(loader)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_loop_that_is_left_leaves_nothing(kind: str, prefetch: int):
    loader = Loader(make(kind, Numbers()), to="jax", prefetch=prefetch)
    for _ in range(2):
        for value in received(loader):
            if value == 8:
                break
        else:
            pytest.fail("it was not left")
    assert not children()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", MAKERS)
def test_an_epoch_of_which_nothing_was_taken_leaves_nothing(kind: str, prefetch: int):
    source = make(kind, Numbers())
    loader = Loader(source, prefetch=prefetch)
    iter(loader)
    assert not children()


@pytest.mark.parametrize("kind", MAKERS)
def test_a_loader_that_is_collected_leaves_nothing(kind: str):
    found = iter(Loader(make(kind, Numbers())))
    next(found)
    assert len(children()) == 2
    del found
    gc.collect()
    assert not children()


@pytest.mark.parametrize("kind", MAKERS)
def test_persistent_workers_stay_as_long_as_their_source(kind: str):
    source = make(kind, Numbers(), persistent_workers=True)
    loader = Loader(source)
    for _ in range(2):
        assert list(received(loader)) == list(range(0, 40, 4))
        assert len(children()) == 2
    del source, loader
    gc.collect()
    assert not children()


def test_batches_that_are_kept_outlive_their_workers():
    td = TensorDict(x=torch.arange(40, dtype=torch.int32), batch_size=[40])
    loader = Loader(make("plain", Rows(td)), to="both")
    kept = list(loader)
    del loader
    gc.collect()
    assert [t["x"].tolist() for t, _ in kept] == [a["x"].tolist() for _, a in kept]
    assert torch.equal(torch.cat([t["x"] for t, _ in kept]), td["x"])
    assert all(t["x"].is_shared() for t, _ in kept)
    assert all(t["x"].data_ptr() == a["x"].unsafe_buffer_pointer() for t, a in kept)


PROGRAM = """
import sys, warnings
warnings.filterwarnings("ignore")
from tests.loaders.test_faults import *
if __name__ == "__main__":
    loader = Loader(make({kind!r}, Numbers()), to="jax")
    found = iter(loader)
    next(found)
    print([p.pid for p in children()], flush=True)
    {last}
"""


@pytest.mark.parametrize(
    ("kind", "last"), [("plain", "pass"), ("stateful", "sys.exit(3)"), ("plain", "boom()")]
)
def test_an_interpreter_that_exits_leaves_no_worker(kind: str, last: str, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(kind=kind, last=last))
    done = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == {"sys.exit(3)": 3, "boom()": 1}.get(last, 0), done.stderr
    assert ("Traceback" in done.stderr) == (last == "boom()"), done.stderr
    pids = eval(done.stdout)
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
