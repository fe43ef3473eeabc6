"""Runs tensordict's own distributed tests on buffers of ours.

    python -m pytest -p tests.peers.tensordict_distributed CHECKOUT/test/distributed/...

Those tests work in processes of their own, which load no plugin. So each process that a test starts
puts ours in before it runs its function, and appends its counts to a file for the report. Calls in
the process of the tests themselves stay with stock.

* `broadcast`, `all_gather`, `scatter`, `init_remote`, `gather_and_stack` and
  `send(consolidated=True)` consolidate: that call of `consolidate` is ours.
* `send`, `isend`, `recv`, `irecv`, `all_reduce` and `reduce` go leaf by leaf: the leaves are put
  into a buffer of ours first.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDictBase

import tdbridge
from tests.peers import tensordict_consolidate
from tests.peers.swap import Tally, report, swapped

CONSOLIDATING = ("broadcast", "all_gather", "scatter", "init_remote", "gather_and_stack")
LEAF_BY_LEAF = ("send", "isend", "recv", "irecv", "all_reduce", "reduce")
COUNTS = pytest.StashKey[Path]()

Tallies = dict[str, Tally]
"""What was counted for each operation."""


def place(tree: Any) -> None:
    """Puts the leaves of `tree` into a buffer of ours; `tree` stays the object that it is."""
    tree.update(tdbridge.consolidate(tree))


def swap(patch: pytest.MonkeyPatch, tallies: Tallies) -> None:
    """Puts ours into `consolidate` and into the operations, and counts for the operation called.

    A `consolidate` that the test calls itself is counted for no operation, but as "consolidate".
    """
    consolidated = tallies["consolidate"]
    tensordict_consolidate.swap(patch, consolidated)

    def instead(name: str) -> Callable[..., Any]:
        stock, tally = getattr(TensorDictBase, name), tallies[name]
        placed = swapped(place, lambda tree: None, tally, (tdbridge.TdbridgeError,))

        @wraps(stock)
        def call(tree: Any, *args: Any, **options: Any) -> Any:
            if name in LEAF_BY_LEAF and not options.get("consolidated"):
                placed(tree)
            before = Tally(consolidated)
            try:
                return stock(tree, *args, **options)
            finally:
                during = consolidated - before
                tally.update(during)
                consolidated.subtract(during)

        return call

    for name in (*CONSOLIDATING, *LEAF_BY_LEAF):
        patch.setattr(TensorDictBase, name, instead(name))


@dataclass(frozen=True)
class OnOurs:
    """The function of a process, run with ours in place; its counts are appended to a file."""

    function: Callable[..., Any]
    counts: Path

    def __call__(self, *args: Any, **options: Any) -> None:
        tallies: Tallies = defaultdict(Tally)
        with pytest.MonkeyPatch.context() as patch:
            swap(patch, tallies)
            try:
                self.function(*args, **options)
            finally:
                write(self.counts, tallies)


def swap_processes(patch: pytest.MonkeyPatch, counts: Path) -> None:
    """Every process of `multiprocessing` that is made from now on runs on ours."""
    init = BaseProcess.__init__

    def instead(process: Any, group: Any = None, target: Any = None, *args: Any, **rest: Any):
        init(process, group, target and OnOurs(target, counts), *args, **rest)

    patch.setattr(BaseProcess, "__init__", instead)


def write(counts: Path, tallies: Tallies) -> None:
    """Appends one line, in one write: other processes append to the same file."""
    rows = [[name, *key, n] for name, tally in tallies.items() for key, n in tally.items()]
    with counts.open("a") as file:
        file.write(json.dumps(rows) + "\n")


def read(lines: Iterable[str]) -> Tallies:
    """The sum over processes, one a line."""
    tallies: Tallies = defaultdict(Tally)
    for line in lines:
        for name, side, why, n in json.loads(line):
            tallies[name][side, why] += n
    return {name: tally for name, tally in tallies.items() if tally.total()}


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    config.stash[COUNTS] = counts = Path(folder.name, "counts")
    counts.touch()
    swap_processes(patch, counts)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash[COUNTS].read_text().splitlines()
    terminalreporter.section(f"{len(lines)} processes ran on tdbridge")
    for name, tally in sorted(read(lines).items()):
        report(terminalreporter, name, tally)
