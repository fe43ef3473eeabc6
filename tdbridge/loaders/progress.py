"""A progress bar over the batches of an epoch."""

import weakref

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress


class Bar:
    """Shown on stderr until it is closed or collected.

    Args:
        done: how many batches were received before.
        total: how many the epoch has, or None if nobody knows.
    """

    def __init__(self, done: int, total: int | None) -> None:
        columns = *Progress.get_default_columns(), MofNCompleteColumn()
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task("batches", completed=done, total=total)
        self.close = weakref.finalize(self, self._progress.stop)
        self._progress.start()

    def advance(self) -> None:
        """One batch more."""
        self._progress.advance(self._task)
