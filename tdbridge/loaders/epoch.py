"""One epoch of a loader: its batches prepared, and how far they were received."""

from collections.abc import Callable, Generator, Iterator
from typing import Any

from tdbridge.errors import LoaderError
from tdbridge.loaders.delivery import Prepare, Receive
from tdbridge.loaders.position import Position
from tdbridge.loaders.progress import Bar
from tdbridge.loaders.sources import Source, State


class Epoch(Iterator[Any]):
    """One way through a source, from a position on.

    Args:
        report: told each new position, as soon as it is one.
        start: where it begins.
        items: what `prepared` gives, here or in a thread.
        bar: shows how far it is.
    """

    def __init__(
        self, report: Callable[[Position], None], start: Position, items: Any, bar: Bar | None
    ) -> None:
        self._report, self._at, self._items, self._bar = report, start, items, bar
        self._done = self._ended_early = False

    def __next__(self) -> Any:
        if self._ended_early:
            raise LoaderError(
                "this iteration was ended where it was, by a newer one of the same Loader, by "
                "load_state_dict or by close."
            )
        try:
            receive, state = next(self._items)
            if receive is None:
                self._report(self._at.at_end(state))
                raise StopIteration
            batch = receive()
        except BaseException:  # StopIteration included
            self.close()
            raise
        self._at = self._at.after(state)
        self._report(self._at)
        if self._bar is not None:
            self._bar.advance()
        return batch

    def end_early(self) -> None:
        """Ends the source's epoch, where it is. Who asks for more would miss what is left."""
        self._ended_early = not self._done
        self.close()

    def close(self) -> None:
        """Ends the source's epoch, where it is; there is nothing more to come."""
        self._done = True
        self._items.close()
        if self._bar is not None:
            self._bar.close()


def prepared(
    source: Source, prepare: Prepare, start: Position
) -> Generator[tuple[Receive | None, State | None]]:
    """The batches from `start` on, prepared, each with the state of the source behind it.

    The epoch has begun when this returns, in the thread that called: workers are forked here. The
    last item has no batch, and the state at the end.
    """
    items = _from_begin_to_end(source, prepare, start)
    next(items)  # one that has not started would not end the source when it is closed
    return items


def _from_begin_to_end(source: Source, prepare: Prepare, start: Position) -> Generator[Any]:
    def step(batch: Any) -> tuple[Receive, State]:
        try:
            return prepare(batch), source.state()
        except StopIteration as error:  # `map` would end, as if there were no more batches
            raise LoaderError("a batch was lost: what prepares it raised StopIteration.") from error

    try:
        # No loop, whose variable would keep a batch alive until the next one.
        items = map(step, source.begin(start.source, start.batch))
        yield
        yield from items
        yield None, source.state_at_end()
    finally:
        items = None  # an error would hold it, and with it the workers
        source.end()
