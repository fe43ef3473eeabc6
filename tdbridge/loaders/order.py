"""What the order of a torch loader comes from: its generators, and the epoch of its sampler."""

import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from tdbridge.errors import LoaderError

_SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Order:
    """The generators of a DataLoader and its samplers, and the epochs that a user sets.

    An epoch is of a sampler, of the dataset, or of a source that is no DataLoader: of what has
    `set_epoch`, as DistributedSampler and the datasets of Hugging Face have.

    Args:
        loader: a DataLoader, or any other source.

    Attributes:
        rewinds: whether a sampler sets its generator back when the loader loads a state.
    """

    def __init__(self, loader: Any) -> None:
        parts = _parts(loader)
        found = [getattr(part, "generator", None) for part in parts]
        self._generators = [*{id(g): g for g in found if isinstance(g, torch.Generator)}.values()]
        dated = loader, *parts[1:], getattr(loader, "dataset", None)
        self._dated: list[Any] = [part for part in dated if hasattr(part, "set_epoch")]
        self.rewinds = any(map(_rewinds, parts))
        self._lost = _lost(loader, parts) if parts else None

    def get(self) -> dict[str, Any]:
        """What `set` takes; the tensors in it are copies."""
        return {
            "generators": [generator.get_state() for generator in self._generators],
            "epochs": self.epochs(),
        }

    def epochs(self) -> list[Any]:
        """What `set_epochs` takes."""
        return [getattr(part, "epoch", None) for part in self._dated]

    def check_fits(self, state: dict[str, Any]) -> None:
        """Checks a state before `set`.

        Raises:
            LoaderError: it is one of another number of generators or epochs.
        """
        for name, own in (("generators", self._generators), ("epochs", self._dated)):
            if len(state[name]) != len(own):
                raise LoaderError(
                    f"the state has {len(state[name])} {name}, and the loader and its samplers "
                    f"have {len(own)}: make the loader as it was made when the state was taken."
                )

    def set(self, state: dict[str, Any]) -> None:
        """Makes the generators what they were."""
        for generator, value in zip(self._generators, state["generators"], strict=True):
            generator.set_state(value)

    def set_epochs(self, epochs: list[Any]) -> None:
        """Makes the epochs what they were."""
        for part, epoch in zip(self._dated, epochs, strict=True):
            if epoch is not None:
                part.set_epoch(epoch)

    def check(self) -> None:
        """Checks that the order can come again.

        Raises:
            LoaderError: it cannot.
        """
        if self._lost is not None:
            raise LoaderError(f"no state brings the order of the batches back: {self._lost}")


def _lost(loader: DataLoader[Any], parts: list[Any]) -> str | None:
    """Why the order of a DataLoader cannot come again, and what to do; None if it can."""
    if any(isinstance(part, _SHUFFLED) and part.generator is None for part in parts):
        return (
            "they are shuffled by torch's global generator. Give the loader one of its own, "
            "generator=torch.Generator(), or use torchdata's StatefulDataLoader."
        )
    if loader.num_workers and not loader.in_order:
        return "they come as the workers are done with them. Leave out in_order=False."
    own = loader.generator
    shared = own is not None and any(getattr(p, "generator", None) is own for p in parts[1:])
    if loader.persistent_workers and shared and not hasattr(loader, "state_dict"):
        return (
            "the first epoch alone draws the seed of persistent workers from the generator that "
            "shuffles. Give the sampler one of its own, sampler=RandomSampler(dataset, "
            "generator=torch.Generator()), or use torchdata's StatefulDataLoader."
        )
    return None


def _parts(loader: Any) -> list[Any]:
    """The loader and its samplers, each once."""
    if not isinstance(loader, DataLoader):
        return []
    inner = getattr(loader.batch_sampler, "sampler", None)
    return [*{id(p): p for p in (loader, loader.sampler, loader.batch_sampler, inner)}.values()]


def _rewinds(part: Any) -> bool:
    """The sampler of torchdata goes back to where its epoch began, and draws the permutation again.

    What the loader had drawn from the same generator since then, it does not draw again.
    """
    module = sys.modules.get("torchdata.stateful_dataloader.sampler")
    return module is not None and isinstance(part, module.RandomSampler)
