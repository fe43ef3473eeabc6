"""What batches come from: how an epoch of it begins, and how one goes on from a state."""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import jax
import numpy as np
import torch
from tensordict import is_tensor_collection
from torch.utils.data import DataLoader, Dataset

from tdbridge.errors import LoaderError
from tdbridge.loaders.order import Order
from tdbridge.loaders.torch_loader import adapt, batches_of

State = dict[str, Any]
"""Plain data, of what Python, numpy and torch have for it."""


_BATCHES = (Mapping, torch.Tensor, np.ndarray, jax.Array)
"""Iterables whose items are parts of a batch, or their names."""


class Source(Protocol):
    """Gives one epoch of batches after another. Used by one thread at a time."""

    def load(self, state: State) -> None:
        """Called before `begin` gets `state`: what a user may change until then is set now."""
        ...

    def begin(self, state: State | None, batch: int) -> Iterator[Any]:
        """The batches of a new epoch; or, after a state, those behind the first `batch` ones."""
        ...

    def state(self) -> State:
        """What `begin` needs to go on after the batch that was read last."""
        ...

    def state_at_end(self) -> State | None:
        """What `begin` needs for the epoch after the one that has just ended, if anything."""
        ...

    def end(self) -> None:
        """Lets go of what the epoch holds, wherever it was left."""
        ...

    def check(self) -> None:
        """Raises a LoaderError if no state can bring the order of the batches back."""
        ...


def source_of(given: Any) -> Source:
    """How to go through what a user gave: a loader, a dataset, an iterable or a function.

    Raises:
        LoaderError: it can be gone through in no way.
    """
    if (why := _why_no_batches(given)) is not None:
        raise LoaderError(f"got a {type(given).__name__}, which {why}")
    if isinstance(given, DataLoader):
        adapt(given)
    if hasattr(given, "state_dict") and hasattr(given, "load_state_dict"):
        return _Stateful(given)
    if _is_grain(given):
        return _Checkpointed(given)
    if isinstance(given, DataLoader):
        return _Replayed(lambda: batches_of(given), Order(given))
    if isinstance(given, Iterable):
        return _Replayed(lambda: iter(given), Order(given), once=isinstance(given, Iterator))
    if callable(given):
        make: Callable[[], Any] = given
        return _Replayed(lambda: iter(make()), Order(None))
    raise LoaderError(
        f"got a {type(given).__name__} to load from: expected what yields batches, such as a torch "
        "DataLoader, a Grain dataset, an iterable, or a function that returns an iterator."
    )


def _why_no_batches(given: Any) -> str | None:
    if is_tensor_collection(given) or isinstance(given, _BATCHES):
        return "is one batch: pass [batch], or a DataLoader over rows, as Rows(td) has them."
    if isinstance(given, (str, bytes)):
        return "holds no batches: pass what reads them."
    if isinstance(given, Dataset) and not isinstance(given, Iterable):
        return "has single rows: pass a DataLoader over it, DataLoader(dataset, batch_size=...)."
    return None


def _is_grain(given: Any) -> bool:
    grain = sys.modules.get("grain")
    if grain is None:  # then it is none of its objects
        return False
    return isinstance(given, (grain.DataLoader, grain.MapDataset, grain.IterDataset))


def _of_hugging_face(given: Any) -> list[Any]:
    """What of a source is a dataset of Hugging Face's: itself, or the dataset of the loader."""
    datasets = sys.modules.get("datasets")
    if datasets is None:
        return []
    parts = given, getattr(given, "dataset", None)
    return [part for part in parts if isinstance(part, datasets.IterableDataset)]


def _check(state: State, keys: set[str]) -> None:
    if {*state} != keys:
        raise LoaderError(
            f"the state is one of another kind of source: got {sorted(state)}, expected "
            f"{sorted(keys)}."
        )


class _Replayed:
    """What has no state: the batches that were received are read again, and dropped.

    Args:
        iterate: gives the batches of an epoch.
        order: what their order comes from.
        once: whether they can be had for one epoch alone.
    """

    def __init__(
        self, iterate: Callable[[], Iterator[Any]], order: Order, *, once: bool = False
    ) -> None:
        self._iterate, self._order, self._once = iterate, order, once
        self._start: State = {}

    def load(self, state: State) -> None:
        _check(state, {"generators", "epochs"})
        self._order.check_fits(state)
        self._order.set_epochs(state["epochs"])

    def begin(self, state: State | None, batch: int) -> Iterator[Any]:
        if self._once and self._start:
            raise LoaderError(
                "the source is an iterator, which was gone through, and has no second epoch: pass "
                "an iterable, or a function that returns a new iterator."
            )
        if state is not None:
            self._order.set(state)
        self._start = self._order.get()
        batches = self._iterate()
        again = sum(1 for _ in islice(batches, batch))
        if again < batch:
            raise LoaderError(
                f"the source ended after {again} batches, and {batch} were received before the "
                "state was taken: it is not the same source, or not from its beginning."
            )
        return batches

    def state(self) -> State:
        return self._start

    def state_at_end(self) -> State:
        return self._order.get()

    def end(self) -> None:
        pass

    def check(self) -> None:
        self._order.check()


class _Stateful:
    """What has `state_dict` and `load_state_dict`: torchdata's loaders, Hugging Face's datasets."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._order = loader, Order(loader)
        self._start: State = {}
        self._last: State | None = None

    def load(self, state: State) -> None:
        _check(state, {"loader", "start", "now", "ended"})
        self._order.check_fits(state["start"])
        self._order.set_epochs(state["start"]["epochs"])

    def begin(self, state: State | None, batch: int) -> Iterator[Any]:
        self._last = None
        if state is None:
            return self._anew()
        epochs = self._order.epochs()  # of the next epoch, if that of the state had ended
        self._order.set_epochs(state["start"]["epochs"])
        self._order.set(state["start"])
        self._loader.load_state_dict(state["loader"])
        batches = self._anew()
        if self._order.rewinds:
            self._order.set(state["now"])
        if not state["ended"]:
            return batches
        for _ in batches:
            raise LoaderError("the source goes on where the epoch of the state had ended.")
        self._forget()
        self._order.set_epochs(epochs)
        return self._anew()

    def _forget(self) -> None:
        """Hugging Face's go back to what they loaded in each epoch of the same number."""
        for dataset in _of_hugging_face(self._loader):
            dataset.load_state_dict({})

    def _anew(self) -> Iterator[Any]:
        self._start = self._order.get()
        loader = self._loader
        return batches_of(loader) if isinstance(loader, DataLoader) else iter(loader)

    def state(self) -> State:
        self._last = {
            # Others than torchdata's may give one that they write over.
            "loader": copy.deepcopy(self._loader.state_dict()),
            "start": self._start,
            "now": self._order.get(),
            "ended": False,
        }
        return self._last

    def state_at_end(self) -> State:
        # Taken now, it would be that of the next epoch in some loaders and of this one in others.
        return (self._last or self.state()) | {"ended": True}

    def end(self) -> None:
        self._forget()
        # A torchdata loader holds its iterator, and with it the workers, for its `state_dict`.
        if isinstance(self._loader, DataLoader) and not self._loader.persistent_workers:
            self._loader.load_state_dict({})  # pyright: ignore[reportAttributeAccessIssue]

    def check(self) -> None:
        self._order.check()


class _Checkpointed:
    """What Grain has: the state is that of the iterator."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._batches: Any = None

    def load(self, state: State) -> None:
        _check(state, {"iterator"})

    def begin(self, state: State | None, batch: int) -> Iterator[Any]:
        self._batches = iter(self._dataset)
        if state is not None:
            self._batches.set_state(state["iterator"])
        return self._batches

    def state(self) -> State:
        return {"iterator": self._batches.get_state()}

    def state_at_end(self) -> None:
        return None

    def end(self) -> None:
        batches, self._batches = self._batches, None
        if hasattr(batches, "close"):
            batches.close()

    def check(self) -> None:
        pass
