"""What a run leaves behind: the JSON file and the table."""

import json
import math
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.case import FLOOR, OURS
from benchmarks.runner import AND, Row

PACKAGES = ("torch", "jax", "tensordict", "numpy", "tdbridge")
Load = tuple[float, float, float]


def make_head(*, rounds: int, quick: bool, load_before: Load) -> dict[str, Any]:
    """Return where, when and on what the figures were measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
        "cpus": os.cpu_count(),
        "load_before": list(load_before),
        "load_after": list(os.getloadavg()),
        "rounds": rounds,
        "quick": quick,
    }


def write_json(path: Path, head: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write the head and the rows."""
    path.write_text(json.dumps({"head": head, "rows": list(rows)}, indent=2) + "\n")


def make_table(head: dict[str, Any], rows: Sequence[Row]) -> Table:
    """Return the results as a table, one line for each of ours against one other."""
    table = Table(caption=_caption(head), caption_justify="left")
    for column in ("case", "ours", "against", "takes", "ours is", "goal"):
        table.add_column(column, no_wrap=column in ("case", "ours", "takes"))
    for row in rows:
        _add_row(table, row)
    return table


def speed(ours: float, other: float) -> Text:
    """Say how fast ours is: a loss as plainly as a win.

    >>> speed(2.0, 1.6).plain, speed(1.0, 12.0).plain, speed(1.0, 1.001).plain
    ('0.80x slower', '12x faster', '1.0x same')
    """
    ratio = significant(other / ours, 2)
    if float(ratio.replace(",", "")) == 1:
        return Text(f"{ratio}x same", "yellow")
    faster = other > ours
    return Text(f"{ratio}x {'faster' if faster else 'slower'}", "green" if faster else "bold red")


def significant(value: float, digits: int) -> str:
    """Write a number with that many significant digits and no exponent.

    >>> significant(1234.5, 3), significant(0.01234, 3), significant(9.999, 2)
    ('1,234', '0.0123', '10')
    """
    rounded = float(f"{value:.{digits - 1}e}")
    magnitude = math.floor(math.log10(rounded)) if rounded else 0
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def _add_row(table: Table, row: Row) -> None:
    times = dict(row["peers"])
    if row["floor"] is not None:
        times[FLOOR] = row["floor"]
    first: list[Any] = [f"{row['suite']}/{row['name']}", _takes(row, OURS, row["ours"])]
    goals = iter(_goals(row))
    for name, time in times.items() or [("", None)]:
        cells = ["", ""] if time is None else [_takes(row, name, time), _speed(row, name, time)]
        table.add_row(*first, name, *cells, next(goals, Text()))
        first = ["", ""]
    table.add_section()


def _takes(row: Row, name: str, time: float) -> str:
    low, high = (significant(value, 3) for value in row["spread"][name])
    memory = row.get("peak_mb")
    peak = "" if memory is None else f", {significant(memory[name], 3)} MB"
    return f"{significant(time, 3)} {row['unit']} [dim]({low} - {high})[/dim]{peak}"


def _speed(row: Row, name: str, time: float) -> Text:
    if name == FLOOR:
        # Everybody is above the floor, so that is neither a win nor a loss.
        return Text(f"{significant(row['ours'] / time, 2)}x the floor", "dim")
    return speed(row["ours"], time)


def _goals(row: Row) -> list[Text]:
    """One verdict per goal; there are never more of them than rivals."""
    return [
        _verdict(goal, goal in row["missed"]) for goal in (row["goal"] or "").split(AND) if goal
    ]


def _verdict(goal: str, missed: bool) -> Text:
    verdict = Text("MISSED", "bold red") if missed else Text("met", "green")
    return verdict.append(f": {goal}", "not bold default")


def _caption(head: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    before, after = head["load_before"][0], head["load_after"][0]
    return (
        f"{versions}; {head['cpus']} CPUs, load {before:.2f} before and {after:.2f} after; "
        f"medians of {head['rounds']} rounds (min - max); {head['date']}"
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
