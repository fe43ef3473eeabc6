"""What is on its way: messages in flight, and what becomes of them."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from tdbridge.collectives.groups import Members
from tdbridge.errors import CollectiveError, TdbridgeError


class Handle:
    """A collective that was begun with `async_op=True`.

    The tree that was passed must not be written to, and one that is reduced in place not be read,
    before `wait()` has returned.
    """

    def __init__(
        self, call: str, members: Members, works: Sequence[Any], finish: Callable[[], Any]
    ) -> None:
        self._call, self._members = call, members
        self._works, self._finish = list(works), finish
        self._result: Any = None
        self._error: BaseException | None = None

    def wait(self) -> Any:
        """The result, once all messages have arrived. The second call returns the same.

        Raises:
            CollectiveError: a message was lost, or did not come within the timeout of the group.
        """
        if self._error is not None:
            raise self._error
        try:
            with told(self._call, self._members):
                while self._works:
                    self._works.pop(0).wait()
            if self._finish is not None:
                finish, self._finish = self._finish, None
                self._result = finish()
        except BaseException as error:
            self._error = error
            raise
        return self._result

    def then(self, finish: Callable[[Any], Any]) -> "Handle":
        """The same messages, and what becomes of the result."""
        return Handle(self._call, self._members, self._works, lambda: finish(self.wait()))

    @property
    def has_ended(self) -> bool:
        """Whether `wait()` was called, and gave a result or raised."""
        return self._error is not None or (self._finish is None and not self._works)

    def is_completed(self) -> bool:
        """Whether the messages that were begun have arrived."""
        return all(work.is_completed() for work in self._works)


class told:  # noqa: N801 - used as `contextlib.suppress` is
    """Makes errors of torch.distributed say which call of ours it was, and what may be wrong."""

    def __init__(self, call: str, members: Members) -> None:
        self._call, self._members = call, members

    def __enter__(self) -> None:
        """Nothing is needed before."""

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        """Raises a CollectiveError in the place of an error of torch.distributed."""
        if isinstance(error, RuntimeError) and not isinstance(error, TdbridgeError):
            text = re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0]).rstrip(". ")
            late = "time" in text.lower() and "out" in text.lower()
            raise CollectiveError(
                f"{self._call} over the ranks {self._members.ranks} did not end: {text}. "
                + (_LATE if late else _LOST)
            ) from error


_LATE = (
    "A rank has ended, did not call this, holds a tree of another layout than at its last call, or "
    "passed None where all passed trees before; with check='always' every rank says which. The "
    "values of the tree are undefined now."
)
_LOST = "A rank has ended or lost its connection. The values of the tree are undefined now."
