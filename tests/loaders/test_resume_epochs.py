"""An epoch that the user sets, of a sampler or a dataset, is that of the uninterrupted run."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tdbridge.loaders import Loader
from tests.loaders.resumable import EPOCHS, PER_EPOCH, Numbers

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Dated:
    """Gives the epoch that was set, with the number of the batch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([self.epoch, i]) for i in range(PER_EPOCH))


class HuggingFace(Dated, IterableDataset[torch.Tensor]):
    """As its datasets are: what was loaded holds for each epoch of the number that it has."""

    loaded: Any = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        same = self.loaded and self.loaded["epoch"] == self.epoch
        self.now = {"epoch": self.epoch, "given": self.loaded["given"] if same else 0}
        while self.now["given"] < PER_EPOCH:
            self.now["given"] += 1
            yield torch.tensor([self.epoch, self.now["given"] - 1])

    def state_dict(self) -> Any:
        return self.now

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def sampled(loader: Any) -> Any:
    return loader(Numbers(), 6, sampler=DistributedSampler(Numbers(), 1, 0, seed=6))


DATED: dict[str, Any] = {
    "iterable": (Dated, lambda source: source),
    "hugging-face": (HuggingFace, lambda source: source),
    "hugging-face-in-a-loader": (
        lambda: StatefulDataLoader(HuggingFace(), batch_size=None),
        lambda source: source.dataset,
    ),
    "sampler": (lambda: sampled(DataLoader), lambda source: source.sampler),
    "sampler-stateful": (lambda: sampled(StatefulDataLoader), lambda source: source.sampler),
}


def dated_run(source: Any, dated: Any, state: Any, sets: bool) -> Iterator[tuple[Any, Any]]:
    """What comes behind a state and the state behind it, the epoch set anew for each, or never."""
    loader = Loader(source)
    if state is not None:
        loader.load_state_dict(state)
    while (epoch := loader.state_dict()["epoch"]) < EPOCHS:
        if sets:
            dated.set_epoch(epoch)
        for batch in loader:
            yield batch.tolist(), loader.state_dict()
        yield None, loader.state_dict()


@pytest.mark.parametrize("sets", [False, True])
@pytest.mark.parametrize("kind", DATED)
def test_an_epoch_that_is_set_is_that_of_the_uninterrupted_run(
    kind: str, sets: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(IterableDataset=HuggingFace))
    make, dated_of = DATED[kind]
    source = make()
    whole = list(dated_run(source, dated_of(source), None, sets))
    firsts = [batch for batch, _ in whole if batch is not None][::PER_EPOCH]
    assert len({str(first) for first in firsts}) == (EPOCHS if sets else 1)
    for k, (_, state) in enumerate(whole):
        source = make()
        rest = [batch for batch, _ in dated_run(source, dated_of(source), state, sets)]
        expected = [batch for batch, _ in whole[k + 1 :]]
        assert [b for b in rest if b is not None] == [b for b in expected if b is not None], k
