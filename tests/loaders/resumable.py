"""Loaders that are made anew in another process, and what is left of them from a state on.

Run as a program, it reads lines of JSON, each a kind of loader and a state, and answers with the
batches that come after the state, to the end of the third epoch.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tdbridge.loaders import Loader

ROWS, BATCH, EPOCHS = 20, 6, 3
PER_EPOCH = 4  # the last one has two rows
# torchdata calls something deprecated; JAX warns of each fork.
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
warnings.filterwarnings("ignore", message=".*os.fork\\(\\) was called")


class Numbers(Dataset[int]):
    """0, 1, 2, ..."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The numbers one after the other, each worker its own; knows where it stands."""

    def __init__(self) -> None:
        self.start = self.given = 0

    def __iter__(self) -> Iterator[int]:
        self.given, self.start = self.start, 0  # now, and not with the first row
        return self._rows()

    def _rows(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.given * step < ROWS:
            self.given += 1
            yield first + (self.given - 1) * step

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]


class Counted:
    """An iterable of the kind that Hugging Face's are: its state is its own."""

    def __init__(self) -> None:
        self.start = self.given = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.given, self.start = self.start, 0
        while self.given < PER_EPOCH:
            self.given += 1
            yield torch.tensor([self.given])

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain(workers: int) -> Any:
    """A DataLoader that shuffles, and draws the seeds of its workers, with one generator."""
    return DataLoader(Numbers(), BATCH, shuffle=True, num_workers=workers, generator=generator(1))


def plain_persistent() -> Any:
    sampler = torch.utils.data.RandomSampler(Numbers(), generator=generator(9))
    return DataLoader(Numbers(), BATCH, sampler=sampler, num_workers=2, persistent_workers=True)


def stateful(workers: int, **given: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(2)  # its sampler has a generator of its own, seeded by torch's
    given = {"shuffle": True} | given
    return StatefulDataLoader(given.pop("dataset", Numbers()), BATCH, num_workers=workers, **given)


def torch_sampler() -> Any:
    sampler = torch.utils.data.RandomSampler(Numbers(), generator=generator(4))
    return {"shuffle": None, "sampler": sampler}


def with_replacement() -> Any:
    from torchdata.stateful_dataloader.sampler import RandomSampler

    g = generator(5)
    sampler = RandomSampler(Numbers(), replacement=True, generator=g)
    return {"shuffle": None, "sampler": sampler, "generator": g}


def distributed() -> Any:
    """Shuffles by its seed and its epoch, which changes as it is used in training."""
    sampler = torch.utils.data.DistributedSampler(Numbers(), 1, 0, seed=6)
    return DataLoader(Numbers(), BATCH, sampler=sampler)


def grain_dataset() -> Any:
    import grain

    return grain.MapDataset.source(range(ROWS)).shuffle(seed=7).batch(BATCH)


def grain_loader() -> Any:
    import grain

    sampler = grain.samplers.IndexSampler(
        ROWS, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=8
    )
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, ROWS, 1),  # pyright: ignore[reportArgumentType]
        sampler=sampler,
        operations=[grain.transforms.Batch(BATCH)],
    )


KINDS = {
    "list": lambda: [torch.tensor([i]) for i in range(PER_EPOCH)],
    "function": lambda: lambda: (torch.tensor([i]) for i in range(PER_EPOCH)),
    "plain": lambda: plain(0),
    "plain-workers": lambda: plain(2),
    "plain-persistent": plain_persistent,
    "distributed": distributed,
    "stateful": lambda: stateful(0),
    "stateful-workers": lambda: stateful(2),
    "stateful-one-generator": lambda: stateful(0, generator=generator(3)),
    "stateful-one-generator-workers": lambda: stateful(2, generator=generator(3)),
    "stateful-torch-sampler": lambda: stateful(0, **torch_sampler()),
    "stateful-replacement": lambda: stateful(0, **with_replacement()),
    "stateful-replacement-workers": lambda: stateful(2, **with_replacement()),
    "stateful-persistent": lambda: stateful(2, persistent_workers=True),
    "stateful-stream": lambda: stateful(0, shuffle=None, dataset=Stream()),
    "stateful-stream-workers": lambda: stateful(2, shuffle=None, dataset=Stream()),
    "own-state": Counted,
    "grain-map": grain_dataset,
    "grain-iter": lambda: grain_dataset().to_iter_dataset(),
    "grain-loader": grain_loader,
}


def batches(loader: Loader) -> Iterator[list[int]]:
    """Epoch after epoch, to the end of the last one; a new epoch number each time."""
    while loader.epoch < EPOCHS:
        for batch in loader:
            yield torch.as_tensor(batch).tolist()


def rest(kind: str, state: dict[str, Any]) -> list[list[int]]:
    """What is left after a state, by a loader that is made anew."""
    loader = Loader(KINDS[kind](), prefetch=2)
    loader.load_state_dict(state)
    return list(batches(loader))


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(rest(*json.loads(line))), flush=True)
