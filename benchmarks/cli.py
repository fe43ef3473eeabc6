"""The command line of the benchmarks."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from benchmarks import suites
from benchmarks.case import BenchmarkError, Case
from benchmarks.report import make_head, make_table, write_json
from benchmarks.runner import Row, run_case
from benchmarks.timing import Timing

# Odd, so that a median is a time that was measured.
ROUNDS, QUICK_ROUNDS = 31, 5
# Wide enough for the table when nobody is looking, as in a CI log.
LOG_WIDTH = 190

Job = tuple[str, Case]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[SUITE]...", help="Which suites; all if none.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results here too.")
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="Print suites and cases.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, smaller trees.")] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help=f"Samples; {ROUNDS}, or {QUICK_ROUNDS} if quick.")
    ] = None,
) -> None:
    """Time tdbridge beside its peers and the floor: in one process, taking turns."""
    jobs = _jobs(names or suites.names(), quick=quick)
    if only_list:
        _list(jobs)
        return
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"no such folder: {json_file.parent}", param_hint="--json")
    load_before = os.getloadavg()
    rounds = rounds or (QUICK_ROUNDS if quick else ROUNDS)
    rows = _run(jobs, Timing(rounds))
    head = make_head(rounds=rounds, quick=quick, load_before=load_before)
    _console().print(make_table(head, rows))
    if json_file is not None:
        write_json(json_file, head, rows)


def _jobs(names: Sequence[str], *, quick: bool) -> list[Job]:
    known = suites.names()
    for name in names:
        if name not in known:
            message = f"no suite {name!r}; there are: {', '.join(known)}"
            raise typer.BadParameter(message, param_hint="SUITE")
    return [(name, case) for name in dict.fromkeys(names) for case in suites.cases(name, quick)]


def _list(jobs: Sequence[Job]) -> None:
    for suite in dict.fromkeys(name for name, _ in jobs):
        typer.echo(suite)
        for name, case in jobs:
            if name == suite:
                typer.echo(f"  {case.name}")


def _run(jobs: Sequence[Job], timing: Timing) -> list[Row]:
    rows = []
    try:
        with _progress() as progress:
            for suite, case in jobs:
                task = progress.add_task(f"{suite}/{case.name}", total=timing.rounds)
                progress.refresh()
                rows.append(run_case(suite, case, timing, partial(_advance, progress, task)))
                progress.remove_task(task)
    except BenchmarkError as error:
        Console(stderr=True).print(
            f"error: {error}", style="bold red", markup=False, soft_wrap=True
        )
        raise typer.Exit(1) from error
    return rows


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # No automatic refresh: its thread would compete with what is being timed.
    return Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)


def _advance(progress: Progress, task: TaskID) -> None:
    progress.advance(task)
    progress.refresh()


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
