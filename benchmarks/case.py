"""What a suite hands to the harness: cases, who competes in them, and the goal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.compare import flat_values

Run = Callable[..., Any]

#: Nanoseconds in one unit of time.
UNITS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
OURS, FLOOR = "ours", "floor"


class BenchmarkError(Exception):
    """A case that must not be timed: wrong values, or described wrongly."""


@dataclass(frozen=True)
class Goal:
    """Our time is at most ``ratio`` times that of ``against``: a peer's name, or ``"floor"``.

    >>> str(Goal(0.25, "tensordict"))
    "ours <= 0.25 * peers['tensordict']"
    >>> Goal(2, "floor").is_met({"ours": 3.0, "floor": 1.0})
    False
    """

    ratio: float
    against: str

    def is_met(self, times: Mapping[str, float]) -> bool:
        """Whether ``times``, which maps each contender to its time, meet the goal."""
        return times[OURS] <= self.ratio * times[self.against]

    def __str__(self) -> str:
        """Return the condition as the JSON file has it."""
        rival = FLOOR if self.against == FLOOR else f"peers[{self.against!r}]"
        return f"ours <= {self.ratio:g} * {rival}"


@dataclass(frozen=True)
class Contenders:
    """What is timed in one case; each is called without arguments, or with what ``fresh`` gives.

    Args:
        ours: The work, done by tdbridge.
        peers: The same work, done by others.
        floor: The least that any of them has to do, such as one copy of the same bytes. Its result
            is not compared.
        ready: Called on each result inside the timing, to wait for what was only dispatched:
            ``jax.block_until_ready``, say.
        fresh: Makes the argument of each single call, outside the timing: for work that is done
            once on an input, and is cheaper a second time.
        values: Turns a result into arrays by path, by which ours and the peers are compared.
        rest: Seconds to wait before each sample, for contenders that still work in the background
            when their call is over.
        times: How often each of them does the work in one call. The row has the time of once.
    """

    ours: Run
    peers: Mapping[str, Run] = field(default_factory=dict)
    floor: Run | None = None
    ready: Callable[[Any], Any] | None = None
    fresh: Callable[[], Any] | None = None
    values: Callable[[Any], Mapping[str, Any]] = flat_values
    rest: float = 0.0
    times: int = 1

    def __post_init__(self) -> None:
        if taken := {OURS, FLOOR} & set(self.peers):
            raise BenchmarkError(f"a peer cannot be called {taken.pop()!r}")

    def runs(self) -> dict[str, Run]:
        """Return every contender by name, ours first and the floor last."""
        floor = {} if self.floor is None else {FLOOR: self.floor}
        return {OURS: self.ours, **self.peers, **floor}

    def called(self) -> dict[str, Run]:
        """Return every contender by name, each to be called without arguments, input included."""
        fresh = self.fresh
        if fresh is None:
            return self.awaited()
        return {name: _on(run, fresh) for name, run in self.awaited().items()}

    def awaited(self) -> dict[str, Run]:
        """Return every contender by name, each returning only when its result is there."""
        runs = self.runs()
        return runs if self.ready is None else {k: _then(r, self.ready) for k, r in runs.items()}


@dataclass(frozen=True)
class Case:
    """One row of the results.

    Args:
        name: Unique in its suite.
        build: Makes the data and the contenders. Called when the case is run, so listing
            the cases is cheap and one case's data is gone when the next one runs.
        goal: What our time should be, if there is a goal; several if all are to be met.
        unit: The unit of time of the row, one of ``UNITS``.
        peak: Whether to measure the peak memory of each contender too.
    """

    name: str
    build: Callable[[], Contenders]
    goal: Goal | tuple[Goal, ...] | None = None
    unit: str = "us"
    peak: bool = False

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise BenchmarkError(
                f"{self.name}: the unit is one of {list(UNITS)}, got {self.unit!r}"
            )

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The goals, however many there are."""
        if isinstance(self.goal, Goal):
            return (self.goal,)
        return self.goal or ()


def _then(run: Run, ready: Callable[[Any], Any]) -> Run:
    return lambda *given: ready(run(*given))


def _on(run: Run, fresh: Callable[[], Any]) -> Run:
    return lambda: run(fresh())
