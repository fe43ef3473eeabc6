"""From a case to a row: check the values, time in turn, measure memory, judge the goal."""

import statistics
from collections.abc import Callable, Mapping
from typing import NotRequired, TypedDict

from benchmarks.case import FLOOR, OURS, UNITS, BenchmarkError, Case, Contenders
from benchmarks.compare import difference
from benchmarks.memory import peak_mb
from benchmarks.timing import Timing, alternate

AND = " and "


class Row(TypedDict):
    """One result, as the JSON file has it; times are medians in ``unit``.

    ``goal`` joins the conditions with "and", ``met`` is whether all hold, and ``missed`` lists
    those that do not.
    """

    suite: str
    name: str
    unit: str
    ours: float
    peers: dict[str, float]
    floor: float | None
    goal: str | None
    met: bool | None
    missed: list[str]
    spread: dict[str, list[float]]
    peak_mb: NotRequired[dict[str, float]]


def run_case(
    suite: str, case: Case, timing: Timing, after_round: Callable[[], None] = lambda: None
) -> Row:
    """Run one case.

    Raises:
        BenchmarkError: A peer's values differ from ours, or the goal names nobody who competes.
    """
    label = f"{suite}/{case.name}"
    contenders = case.build()
    runs = contenders.awaited()
    for goal in case.goals:
        if goal.against not in runs:
            raise BenchmarkError(f"{label}: no {goal.against!r} competes, but the goal names it")
    check_values(label, contenders)
    calls = alternate(runs, timing, after_round, contenders.fresh, contenders.rest)
    samples = {name: [ns / contenders.times for ns in values] for name, values in calls.items()}
    row = make_row(suite, case, samples)
    if case.peak:
        row["peak_mb"] = {name: _rounded(peak_mb(run)) for name, run in contenders.called().items()}
    return row


def check_values(label: str, contenders: Contenders) -> None:
    """Raise unless every peer gives the values that we give: nobody times a wrong result.

    Raises:
        BenchmarkError: With the case, the peer and the first leaf that differs.
    """
    runs = contenders.called()
    ours = contenders.values(runs[OURS]())
    for peer in contenders.peers:
        found = difference(ours, contenders.values(runs[peer]()))
        if found is not None:
            raise BenchmarkError(f"{label}: ours and {peer!r} give different values: {found}")


def make_row(suite: str, case: Case, samples: Mapping[str, list[float]]) -> Row:
    """Return the row of a case from each contender's samples in nanoseconds."""
    scaled = {k: [ns / UNITS[case.unit] for ns in values] for k, values in samples.items()}
    times = {name: _rounded(statistics.median(values)) for name, values in scaled.items()}
    # Of the rounded times, so that who reads the file comes to the same answer.
    missed = [str(goal) for goal in case.goals if not goal.is_met(times)]
    return {
        "suite": suite,
        "name": case.name,
        "unit": case.unit,
        "ours": times[OURS],
        "peers": {name: time for name, time in times.items() if name not in (OURS, FLOOR)},
        "floor": times.get(FLOOR),
        "goal": AND.join(map(str, case.goals)) or None,
        "met": not missed if case.goals else None,
        "missed": missed,
        "spread": {k: [_rounded(min(v)), _rounded(max(v))] for k, v in scaled.items()},
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
