"""Timing several contenders in turn, in one process."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from benchmarks.case import Run


@dataclass(frozen=True)
class Timing:
    """How to time.

    Args:
        rounds: Samples of each contender.
        clock: The time in nanoseconds.
        at_least_ns: A sample repeats a call until it lasts about this long, so that neither
            the clock nor the loop around the call shows in the result.
        warmups: Untimed calls of each contender before anything else.
    """

    rounds: int
    clock: Callable[[], int] = time.perf_counter_ns
    at_least_ns: int = 2_000_000
    warmups: int = 3


def alternate(
    runs: Mapping[str, Run],
    timing: Timing,
    after_round: Callable[[], None] = lambda: None,
    fresh: Callable[[], Any] | None = None,
    rest: float = 0.0,
) -> dict[str, list[float]]:
    """Return each contender's samples, in nanoseconds per call.

    One round takes one sample of each contender, and the next round starts one contender later:
    what slows the machine down for a while then slows all of them down, and none of them always
    runs in the caches that the same other one left.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    with without_gc():
        repeats = {name: _warmed(run, timing, fresh) for name, run in runs.items()}
        for number in range(timing.rounds):
            # Uncollected cycles would pile up over the rounds.
            gc.collect()
            for name in rotated(list(runs), number):
                time.sleep(rest)
                elapsed = sample(runs[name], repeats[name], timing.clock, fresh)
                samples[name].append(elapsed / repeats[name])
            after_round()
    return samples


def sample(
    run: Run, repeats: int, clock: Callable[[], int], fresh: Callable[[], Any] | None = None
) -> int:
    """Return how long ``repeats`` calls take, in nanoseconds.

    With ``fresh`` each is timed on its own, what makes its argument and frees its result left out.
    """
    if fresh is not None:
        return sum(_once(run, fresh(), clock) for _ in range(repeats))
    start = clock()
    for _ in repeat(None, repeats):
        run()
    return clock() - start


def _once(run: Run, given: Any, clock: Callable[[], int]) -> int:
    start = clock()
    result = run(given)
    elapsed = clock() - start
    del result
    return elapsed


def calibrate(run: Run, timing: Timing, fresh: Callable[[], Any] | None = None) -> int:
    """Return how many calls one sample needs to last ``timing.at_least_ns``."""
    repeats = 1
    while True:
        # The least of three: one interruption must not make a short call look long.
        elapsed = max(1, min(sample(run, repeats, timing.clock, fresh) for _ in range(3)))
        if elapsed >= timing.at_least_ns:
            return repeats
        wanted = math.ceil(repeats * timing.at_least_ns / elapsed)
        repeats = min(max(wanted, repeats + 1), 10 * repeats)


def rotated(names: list[str], by: int) -> list[str]:
    """Return ``names`` starting with the one at ``by``.

    >>> rotated(["ours", "peer", "floor"], 4)
    ['peer', 'floor', 'ours']
    """
    start = by % len(names)
    return names[start:] + names[:start]


@contextmanager
def without_gc() -> Iterator[None]:
    """Switch automatic collection off, and make an explicit one cheap by freezing what is there."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _warmed(run: Run, timing: Timing, fresh: Callable[[], Any] | None) -> int:
    sample(run, timing.warmups, timing.clock, fresh)
    return calibrate(run, timing, fresh)
