"""A function of ours in place of another project's, falling back to theirs, and counted."""

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import pytest

Tally = Counter[tuple[str, str]]
"""How often each ("ours" or "stock", reason) was called."""


class NotServed(Exception):  # noqa: N818 - not an error: the call goes to stock
    """Ours does not do what this call asks for; the message says why."""


_in_stock = ContextVar("_in_stock", default=False)


def swapped(
    ours: Callable[..., Any],
    stock: Callable[..., Any],
    tally: Tally,
    refusals: tuple[type[Exception], ...] = (),
) -> Callable[..., Any]:
    """`ours`, or `stock` when ours raises NotServed or one of `refusals`; each call is counted.

    What `stock` itself calls on the way stays with stock and is not counted: it is a part of the
    call that was.
    """

    @wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _in_stock.get():
            return stock(*args, **kwargs)
        try:
            result = ours(*args, **kwargs)
        except (NotServed, *refusals) as refusal:
            tally["stock", reason(refusal)] += 1
        else:
            tally["ours", ""] += 1
            return result
        token = _in_stock.set(True)
        try:
            return stock(*args, **kwargs)
        finally:
            _in_stock.reset(token)

    return call


def reason(refusal: Exception) -> str:
    """What was refused, without the path of the leaf it was found at."""
    message = str(refusal)
    _, found, rest = message.partition(": got ")
    return f"got {rest}" if found else message


def report(reporter: pytest.TerminalReporter, title: str, tally: Tally) -> None:
    """Prints the two counts and, for what went to stock, the reasons."""
    stock = Counter({why: n for (side, why), n in tally.items() if side == "stock"})
    reporter.section(title)
    reporter.line(f"served by ours: {tally['ours', '']}")
    reporter.line(f"left to stock: {stock.total()}")
    for why, n in stock.most_common():
        reporter.line(f"{n:6}  {why}")
