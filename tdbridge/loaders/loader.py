"""`Loader`: batches of any source, prefetched, for torch, for JAX or for both."""

import weakref
from collections.abc import Iterator, Mapping
from threading import Thread
from typing import Any, NoReturn

from tdbridge.convert.narrowing import Narrow
from tdbridge.errors import LoaderError
from tdbridge.loaders.delivery import Change, To, change_of, preparation
from tdbridge.loaders.epoch import Epoch, prepared
from tdbridge.loaders.position import Position
from tdbridge.loaders.prefetch import Ahead
from tdbridge.loaders.progress import Bar
from tdbridge.loaders.sources import source_of


class Loader:
    """Iterates over the batches of a source, those to come prepared in a thread meanwhile.

    Args:
        source: anything that yields batches: a torch DataLoader, a StatefulDataLoader, a Grain
            DataLoader, MapDataset or IterDataset, a Hugging Face dataset, any iterable, or a
            function that returns an iterator. A batch is a TensorDict, a tensorclass, an
            ArrayDict, a dict, tuple or dataclass of tensors or arrays, or any other pytree of them.
            The source is for this Loader alone, as long as the Loader is not closed.
        to: `"torch"` gives tensors, `"jax"` gives jax arrays, `"both"` gives a pair of the two
            over the same memory.
        device: where batches go: a torch device for `"torch"` and `"both"`, a `jax.Device` or the
            name of a platform for `"jax"`. By default they stay where they are.
        sharding: for `"jax"`, a `jax.sharding.Sharding` or a tree of them, as in `to_jax`. Of one
            over the devices of several processes, each process loads its own part, and gets an
            array over all of them.
        prefetch: how many batches are prepared ahead of the one that was received; 0 for none,
            without a thread.
        cast: a dtype, or a `Precision` whose `compute` is meant: floating-point leaves are cast
            before they are moved.
        transform: called with each batch of the source, before it is cast, in the fetching thread.
            A source that writes over the batch it gave before needs one that copies,
            `lambda batch: batch.clone()`: a batch is not copied where that is not needed.
        packed: for `"jax"` and `"both"`, give TensorDicts as `PackedArrayDict`: one transfer per
            dtype.
        narrow: for `"jax"` and `"both"`, what to do with 64-bit leaves while x64 is off, as in
            `to_jax`: `"exact"`, `"allow"` or `"never"`.
        progress: show a progress bar on stderr.

    Memory: on the CPU a batch shares the memory that the source gave, where it can, and nothing
    writes to that memory again. A batch for a torch accelerator is copied through pinned buffers,
    which are used again when the copy is done.

    Raises:
        LoaderError: the source gives no batches, or another Loader has it.
        ValueError: arguments that do not go together.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> batches = [TensorDict(x=torch.full((2,), i), batch_size=[2]) for i in range(3)]
        >>> loader = Loader(batches, to="jax", cast="bfloat16")
        >>> [int(batch["x"].sum()) for batch in loader], len(loader)
        ([0, 2, 4], 3)
    """

    def __init__(
        self,
        source: Any,
        *,
        to: To = "torch",
        device: Any = None,
        sharding: Any = None,
        prefetch: int = 2,
        cast: Any = None,
        transform: Change | None = None,
        packed: bool = False,
        narrow: Narrow = "exact",
        progress: bool = False,
    ) -> None:
        if not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"prefetch is a number of batches, 0 or more, got {prefetch!r}.")
        self._prepare = preparation(
            to,
            change_of(transform, cast),
            device=device,
            sharding=sharding,
            packed=packed,
            narrow=narrow,
            prefetch=prefetch,
        )
        self._prefetch, self._progress = prefetch, progress
        self._given = source
        self._source = source_of(source)
        self._position, self._resumes = Position(), False
        self._epoch: weakref.ref[Epoch] | None = None
        self._thread: Thread | None = None
        claim(self, source)

    def __iter__(self) -> Iterator[Any]:
        """A new epoch; or, after `load_state_dict`, what is left of the one of that state.

        An iteration of this Loader that is not at its end is ended, once the source has given the
        batch that it is in the middle of.
        """
        self._end_epoch()
        if self not in _OPEN:
            raise LoaderError("this Loader was closed: make another one.")
        if self._thread is not None:  # it may still be in the middle of a batch of the source
            self._thread.join()
        at = self._position
        start = at if self._resumes else Position(at.epoch + (at.batch > 0))
        items: Any = prepared(self._source, self._prepare, start)
        self._thread = None
        if self._prefetch:
            items = Ahead(items, self._prefetch)
            self._thread = items.thread
        self._resumes = False
        epoch = Epoch(self._received, start, items, self._bar(start.batch))
        self._epoch = weakref.ref(epoch)
        return epoch

    def __len__(self) -> int:
        """The number of batches of an epoch, as the source says it; a TypeError if it does not."""
        return len(self._given)

    @property
    def epoch(self) -> int:
        """How many epochs have ended, those before a resume included."""
        return self._position.epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: behind the last batch that was received, not the last prepared.

        Two numbers, `epoch` (how many have ended) and `batch` (how many batches of the next one
        were received), and a text, so that it is saved by torch.save, torch.distributed.checkpoint,
        Orbax, JSON and `tdbridge.checkpoint` alike.

        Raises:
            LoaderError: no state brings the order of the batches back, as that of torch's global
                generator, or the source has a state that is no plain data.
        """
        self._source.check()
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on behind the batch after which `state` was taken.

        The loader and its source are made as they were then; an iteration that runs is ended. A
        torchdata loader, a Hugging Face dataset and Grain go on from a state of their own. Of any
        other source the batches that were received are read again, and dropped.

        Epochs that were set (`sampler.set_epoch`, `dataset.set_epoch`) are set to those of `state`
        now; set that of the next epoch afterwards, as without a state.

        Raises:
            LoaderError: `state` is none that `state_dict` gave, or one of another kind of source.
        """
        position = Position.of(state)
        self._end_epoch()
        if position.source is not None:
            self._source.load(position.source)
        self._position, self._resumes = position, True

    def __reduce__(self) -> NoReturn:
        raise LoaderError(
            "a Loader cannot be copied or pickled, for it has its source to itself: make another "
            "one over a source of its own, and give it this one's state_dict()."
        )

    def close(self) -> None:
        """Ends what runs, and gives the source back, for another Loader to have it."""
        self._end_epoch()
        _OPEN.discard(self)

    def _end_epoch(self) -> None:
        epoch = self._epoch and self._epoch()
        if epoch is not None:
            epoch.end_early()

    def _received(self, position: Position) -> None:
        self._position = position

    def _bar(self, batch: int) -> Bar | None:
        if not self._progress:
            return None
        try:
            return Bar(batch, len(self))
        except TypeError:
            return Bar(batch, None)


_OPEN: weakref.WeakSet[Loader] = weakref.WeakSet()


def claim(loader: Loader, source: Any) -> None:
    """Takes note that `loader` goes through `source`, and no other one does.

    Raises:
        LoaderError: another Loader has it.
    """
    if any(other._given is source for other in _OPEN):
        raise LoaderError(
            f"another Loader goes through this {type(source).__name__}, and each would take "
            'batches, and the state, from the other: use one, with to="both" if two frameworks '
            "need the batches, or close() the other one first."
        )
    _OPEN.add(loader)
