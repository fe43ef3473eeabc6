"""The harness of the benchmarks, with a clock that only moves when a contender moves it."""

import doctest
import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from rich.console import Console
from tensordict import TensorDict
from typer.testing import CliRunner

from benchmarks import case, compare, report, suites, timing
from benchmarks.case import BenchmarkError, Case, Contenders, Goal
from benchmarks.cli import app
from benchmarks.compare import as_numpy, difference, flat_values
from benchmarks.memory import peak_mb
from benchmarks.runner import Row, check_values, make_row, run_case
from benchmarks.suites import _loader_peers, convert, loaders
from benchmarks.timing import Timing, alternate, calibrate, rotated, sample

ROOT = Path(__file__).parent.parent
ROW_KEYS = {"suite", "name", "unit", "ours", "peers", "floor", "goal", "met", "missed", "spread"}
HEAD_KEYS = {"date", "versions", "cpus", "load_before", "load_after", "rounds", "quick"}
VERSIONS = {"python", "torch", "jax", "tensordict", "numpy", "tdbridge"}

FAKE_SUITE = """
from benchmarks.case import Case, Contenders, Goal

def cases(quick):
    yield Case("equal", lambda: Contenders(lambda: 1, {"peer": lambda: 1}), Goal(1e9, "peer"))
    if not quick:
        yield Case("wrong", lambda: Contenders(lambda: 1, {"peer": lambda: 2}))
"""


@dataclass
class FakeClock:
    """A clock in nanoseconds; its contenders note each call and take the time they are told to."""

    now: int = 0
    calls: list[str] = field(default_factory=list)

    def __call__(self) -> int:
        return self.now

    def contender(self, name: str, *costs: int, result: object = 0) -> Callable[[], object]:
        """Return a contender whose calls cost ``costs`` one after the other, around and around."""

        cycle = itertools.cycle(costs)

        def run() -> object:
            self.now += next(cycle)
            self.calls.append(name)
            return result

        return run

    def timing(self, rounds: int, *, at_least_ns: int = 1, warmups: int = 0) -> Timing:
        return Timing(rounds, self, at_least_ns, warmups)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def fake_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A suite in another folder: one good case, and one with wrong values unless quick."""
    (tmp_path / "fake.py").write_text(FAKE_SUITE)
    (tmp_path / "_helper.py").touch()
    monkeypatch.setattr(suites, "__path__", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "benchmarks.suites.fake", raising=False)
    importlib.invalidate_caches()
    return "fake"


def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments)


def row_of(**times: float) -> Row:
    """Return the row of a case whose samples were all the same."""
    goal = Goal(1, "peer") if "peer" in times else None
    samples = {name: [time * 1e3] for name, time in times.items()}
    return make_row("suite", Case("case", lambda: Contenders(int), goal), samples)


# Timing


def test_contenders_take_turns_and_each_round_starts_one_later(clock: FakeClock):
    """One sample of each contender a round, the order rotated from round to round."""
    runs = {name: clock.contender(name, 5) for name in ("ours", "peer", "floor")}
    alternate(runs, clock.timing(rounds=4))
    rounds = ["ours", "peer", "floor", "peer", "floor", "ours", "floor", "ours", "peer"]
    assert clock.calls[9:] == [*rounds, "ours", "peer", "floor"]


def test_every_contender_is_warm_before_the_first_sample(clock: FakeClock):
    """Warm-up calls come first and are in no sample."""
    run = clock.contender("ours", *[1_000] * 4, *[10] * 6)
    samples = alternate({"ours": run}, clock.timing(rounds=3, warmups=4))
    assert samples == {"ours": [10.0] * 3}


def test_a_sample_is_the_time_per_call(clock: FakeClock):
    """However many calls one sample takes, it is divided by their number."""
    runs = {"ours": clock.contender("ours", 10), "peer": clock.contender("peer", 7_000)}
    samples = alternate(runs, clock.timing(rounds=2, at_least_ns=5_000))
    assert samples == {"ours": [10.0, 10.0], "peer": [7_000.0, 7_000.0]}


@pytest.mark.parametrize("cost", [1, 7, 1_000, 1_999, 2_000, 10**9])
def test_calibration_takes_the_fewest_calls_that_last_long_enough(clock: FakeClock, cost: int):
    """A call that lasts long enough by itself is not repeated."""
    repeats = calibrate(clock.contender("ours", cost), clock.timing(1, at_least_ns=2_000))
    assert repeats == -(-2_000 // cost)


def test_one_interrupted_call_does_not_shorten_the_samples(clock: FakeClock):
    """Calibration believes the least of three."""
    run = clock.contender("ours", 5_000_000, *[100] * 100)
    assert calibrate(run, clock.timing(1, at_least_ns=1_000)) == 10


def test_calibration_ends_with_a_clock_too_coarse_for_one_call(clock: FakeClock):
    """A call too short for the clock is repeated until the clock sees it."""
    calls: list[int] = []
    repeats = calibrate(lambda: calls.append(1), Timing(1, lambda: len(calls) // 100, 2))
    assert 100 <= repeats <= 300


def test_sample_repeats_the_call(clock: FakeClock):
    """One sample is that many calls, back to back."""
    assert sample(clock.contender("ours", 3), 5, clock) == 15
    assert clock.calls == ["ours"] * 5


def test_rotation_goes_around():
    """Any round number is a valid rotation."""
    assert [rotated(["a", "b"], by) for by in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_no_garbage_is_collected_automatically_while_timing():
    """The collector is off while contenders run and on again afterwards, also after an error."""
    seen = []
    alternate({"ours": lambda: seen.append(gc.isenabled())}, Timing(2, at_least_ns=1))
    assert set(seen) == {False}
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        alternate({"ours": lambda: 1 // 0}, Timing(2))
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_the_progress_hears_of_every_round(clock: FakeClock):
    """The callback comes once a round, outside the samples."""
    rounds = []
    alternate({"ours": clock.contender("ours", 1)}, clock.timing(4), lambda: rounds.append(1))
    assert len(rounds) == 4


# Cases, goals and rows


@pytest.mark.parametrize(
    ("goal", "text", "met"),
    [
        (Goal(0.25, "tensordict"), "ours <= 0.25 * peers['tensordict']", True),
        (Goal(0.2, "tensordict"), "ours <= 0.2 * peers['tensordict']", False),
        (Goal(2, "floor"), "ours <= 2 * floor", True),
        (Goal(1.0, "floor"), "ours <= 1 * floor", False),
    ],
)
def test_a_goal_prints_and_judges_itself(goal: Goal, text: str, met: bool):
    """The bound itself is within the goal."""
    assert str(goal) == text
    assert goal.is_met({"ours": 2.0, "tensordict": 8.0, "floor": 1.0}) is met


def test_a_row_has_the_medians_and_the_extremes_in_the_unit_of_the_case():
    """Nanoseconds come in; the middle one, the least and the most go out, scaled."""
    halved = Case("c", lambda: Contenders(int), Goal(0.5, "peer"), unit="ms")
    samples = {"ours": [9e6, 2e6, 1e6], "peer": [4e6, 4e6, 4e6], "floor": [1e6, 1e6, 7e6]}
    assert make_row("s", halved, samples) == {
        "suite": "s",
        "name": "c",
        "unit": "ms",
        "ours": 2.0,
        "peers": {"peer": 4.0},
        "floor": 1.0,
        "goal": "ours <= 0.5 * peers['peer']",
        "met": True,
        "missed": [],
        "spread": {"ours": [1.0, 9.0], "peer": [4.0, 4.0], "floor": [1.0, 7.0]},
    }


def test_a_case_without_floor_and_goal_has_none_of_them_in_its_row(clock: FakeClock):
    """What does not apply is None, so every row has the same keys."""
    row = run_case("s", Case("c", lambda: Contenders(clock.contender("ours", 1))), clock.timing(1))
    assert set(row) == ROW_KEYS
    assert (row["peers"], row["floor"], row["goal"], row["met"]) == ({}, None, None, None)


def test_a_row_has_the_peak_memory_only_if_the_case_asks(clock: FakeClock):
    """Every contender's peak is there, the floor's too."""
    contenders = Contenders(lambda: bytearray(1), floor=clock.contender("floor", 1))
    row = run_case("s", Case("c", lambda: contenders, peak=True), Timing(1, at_least_ns=1))
    assert set(row) == ROW_KEYS | {"peak_mb"}
    assert set(row.get("peak_mb", {})) == {"ours", "floor"}


def test_results_are_awaited_inside_the_timing(clock: FakeClock):
    """What a call only dispatched is waited for, for every contender alike."""
    contenders = Contenders(
        ours=clock.contender("ours", 1, result="a"),
        peers={"peer": clock.contender("peer", 2, result="a")},
        ready=lambda result: clock.contender("ready", 100)() or result,
    )
    row = run_case("s", Case("c", lambda: contenders, unit="ns"), clock.timing(1))
    assert (row["ours"], row["peers"]) == (101.0, {"peer": 102.0})


def test_of_several_goals_all_have_to_be_met_and_the_missed_ones_are_named():
    """Ours 4, a peer of 10, a floor of 1: at most half the peer, more than twice the floor."""
    goals = (Goal(0.5, "peer"), Goal(2, "floor"))
    case = Case("c", lambda: Contenders(int), goals, unit="ns")
    row = make_row("s", case, {"ours": [4.0], "peer": [10.0], "floor": [1.0]})
    assert row["goal"] == "ours <= 0.5 * peers['peer'] and ours <= 2 * floor"
    assert (row["met"], row["missed"]) == (False, ["ours <= 2 * floor"])


def test_a_goal_against_nobody_is_refused(clock: FakeClock):
    """A misspelt peer is an error before anything is timed."""
    contenders = Contenders(clock.contender("ours", 1))
    with pytest.raises(BenchmarkError, match="s/c: no 'peer' competes, but the goal names it"):
        run_case("s", Case("c", lambda: contenders, Goal(1, "peer")), clock.timing(1))
    assert clock.calls == []


def test_a_peer_cannot_take_a_name_that_a_row_uses():
    """Times and spreads are by name, so a second "ours" would replace the first."""
    with pytest.raises(BenchmarkError, match="a peer cannot be called 'floor'"):
        Contenders(int, {"floor": int})


def test_an_unknown_unit_is_refused():
    """The unit decides the scale, so there is no default for a misspelt one."""
    with pytest.raises(BenchmarkError, match=r"c: the unit is one of \[.*\], got 'sec'"):
        Case("c", lambda: Contenders(int), unit="sec")


# Values


def test_wrong_values_stop_the_case_before_any_timing(clock: FakeClock):
    """The message names the case, the peer, the leaf and both values."""
    contenders = Contenders(
        ours=clock.contender("ours", 1, result={"a": {"b": torch.tensor([1.0, 2.0])}}),
        peers={
            "peer": clock.contender("peer", 1, result={"a": {"b": np.array([1, 3], np.float32)}})
        },
    )
    with pytest.raises(BenchmarkError) as raised:
        run_case("s", Case("c", lambda: contenders), clock.timing(9))
    assert str(raised.value) == (
        "s/c: ours and 'peer' give different values: "
        "'a.b' is float32[2] [1. 2.] in ours and float32[2] [1. 3.] in theirs"
    )
    assert clock.calls == ["ours", "peer"]


@pytest.mark.parametrize(
    "other",
    [
        {"b": np.zeros(2, np.int32)},
        {"a": np.zeros(2, np.int64)},
        {"a": np.zeros((1, 2), np.int32)},
        {"a": np.ones(2, np.int32)},
    ],
    ids=["path", "dtype", "shape", "value"],
)
def test_every_kind_of_difference_is_found(other: dict[str, np.ndarray]):
    """Another path, dtype, shape or value is another result."""
    assert difference({"a": np.zeros(2, np.int32)}, other) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_equal_values_are_equal_in_every_framework(dtype: torch.dtype):
    """Also NaN, and the dtypes that NumPy knows through ml_dtypes only."""
    leaf = torch.tensor([[1.5, float("nan")]]).to(dtype)
    name = str(dtype).removeprefix("torch.")
    array = np.array([[1.5, np.nan]], dtype=getattr(ml_dtypes, name, name))
    td = TensorDict({"a": {"x": leaf}}, batch_size=[1])
    assert difference(flat_values(td), flat_values({"a": {"x": array}})) is None
    assert as_numpy(leaf).dtype == array.dtype


def test_values_can_be_compared_in_the_case_s_own_way():
    """A case whose peers give another structure brings its own view of a result."""
    peers = {"peer": lambda: [2, 1]}
    check_values("s/c", Contenders(lambda: [1, 2], peers, values=lambda r: {"sum": np.sum(r)}))
    with pytest.raises(BenchmarkError):
        check_values("s/c", Contenders(lambda: [1, 2], peers))


# Memory


def test_the_peak_counts_what_was_freed_again_before_the_end():
    """60 MB for a moment and 20 MB kept: the peak is 80 MB."""

    def run() -> bytes:
        kept = b"x" * 20_000_000
        gone = b"y" * 60_000_000
        time.sleep(0.2)  # long enough to be sampled on a busy machine too
        del gone
        return kept

    assert 75 < peak_mb(run) < 100


def test_a_call_that_allocates_nothing_has_no_peak():
    """What the process held before does not count."""
    assert peak_mb(lambda: None) < 10


# The report


@pytest.mark.parametrize(
    ("ours", "other", "text", "style"),
    [
        (1.0, 4.0, "4.0x faster", "green"),
        (5.0, 4.0, "0.80x slower", "bold red"),
        (1.0, 1.001, "1.0x same", "yellow"),
        (1.0, 1234.0, "1,234x faster", "green"),
    ],
)
def test_a_loss_is_shown_as_plainly_as_a_win(ours: float, other: float, text: str, style: str):
    """The same words and digits either way, and a colour."""
    speed = report.speed(ours, other)
    assert (speed.plain, speed.style) == (text, style)


def test_the_table_shows_times_ratios_and_goals():
    """Each case has a line per rival; a missed goal is said to be missed."""
    head = report.make_head(rounds=1, quick=True, load_before=os.getloadavg())
    rows = [row_of(ours=2.0, peer=1.0, floor=0.5), row_of(ours=1.0, peer=3.0), row_of(ours=7.0)]
    console = Console(width=140)
    with console.capture() as captured:
        console.print(report.make_table(head, rows))
    text = captured.get()
    for part in [
        "0.50x slower",
        "4.0x the floor",
        "3.0x faster",
        "MISSED: ours <= 1",
        "met: ours <= 1",
        "7.00 us",
    ]:
        assert part in text


def test_the_table_has_a_verdict_for_each_goal():
    """One a line, beside the rivals: the first is met, the second missed."""
    goals = (Goal(0.5, "peer"), Goal(2, "floor"))
    case = Case("c", lambda: Contenders(int), goals, unit="ns")
    row = make_row("s", case, {"ours": [4.0], "peer": [10.0], "floor": [1.0]})
    head = report.make_head(rounds=1, quick=True, load_before=(0, 0, 0))
    console = Console(width=140)
    with console.capture() as captured:
        console.print(report.make_table(head, [row]))
    lines = [line for line in captured.get().splitlines() if " ours <= " in line]
    assert ["met: ours <= 0.5 * peers['peer']" in line for line in lines] == [True, False]
    assert ["MISSED: ours <= 2 * floor" in line for line in lines] == [False, True]


def test_the_table_shows_peak_memory_where_it_was_measured():
    """Beside the time of the contender that took it."""
    row = row_of(ours=2.0, peer=1.0)
    row["peak_mb"] = {"ours": 12.34, "peer": 5.0}
    table = report.make_table(report.make_head(rounds=1, quick=True, load_before=(0, 0, 0)), [row])
    console = Console(width=140)
    with console.capture() as captured:
        console.print(table)
    assert "12.3 MB" in captured.get()


# The command line


def test_list_prints_suites_and_cases_and_runs_nothing(fake_suite: str):
    """Suites are found by file name; a name with an underscore in front is no suite."""
    result = invoke("--list")
    assert (result.exit_code, result.output) == (0, f"{fake_suite}\n  equal\n  wrong\n")


def test_an_unknown_suite_is_an_error_that_names_the_known_ones(fake_suite: str):
    """Exit code 2, as for any wrong argument."""
    result = invoke("cor")
    assert result.exit_code == 2
    assert f"no suite 'cor'; there are: {fake_suite}" in result.stderr


def test_a_folder_that_is_missing_is_noticed_before_the_run(fake_suite: str, tmp_path: Path):
    """Nobody waits for a benchmark whose result cannot be written."""
    result = invoke(fake_suite, "--json", str(tmp_path / "none" / "x.json"))
    assert result.exit_code == 2
    assert "no such folder" in result.stderr


def test_wrong_values_end_the_run_with_a_message(fake_suite: str, tmp_path: Path):
    """Exit code 1, the reason on one line, no traceback and no file."""
    result = invoke(fake_suite, "--rounds", "1", "--json", str(tmp_path / "x.json"))
    assert result.exit_code == 1
    assert "error: fake/wrong: ours and 'peer' give different values: '' is" in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "x.json").exists()


def test_quick_runs_fewer_rounds_and_smaller_suites(fake_suite: str, tmp_path: Path):
    """The suite hears of it, and so does the head of the file."""
    path = tmp_path / "x.json"
    result = invoke("--quick", "--json", str(path))
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())
    assert (written["head"]["quick"], written["head"]["rounds"]) == (True, 5)
    assert [row["name"] for row in written["rows"]] == ["equal"]


@pytest.mark.slow
def test_the_core_suite_runs_and_writes_what_it_measured(tmp_path: Path):
    """The real thing in a process of its own; its times are nobody's business here."""
    path = tmp_path / "core.json"
    command = [sys.executable, "-m", "benchmarks", "core", "--quick", "--json", str(path)]
    done = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    assert set(written) == {"head", "rows"}
    assert set(written["head"]) == HEAD_KEYS
    assert set(written["head"]["versions"]) == VERSIONS
    assert [row["name"] for row in written["rows"]] == [
        "consolidate-10",
        "consolidate-1000",
        "consolidate-mixed",
        "to_jax-10",
        "to_jax-1000",
        "to_torch-10",
        "to_torch-1000",
    ]
    for row in written["rows"]:
        check_row(row, "core")


# The suite "convert"

CONVERT_CASES = """
to_jax-10 to_jax-20 to_jax-10-consolidated to_torch-10 to_torch-20 to_torch-10-again
packed-10 packed-20 consolidate-10 refill-10 flatten-10
""".split()


@pytest.fixture
def few_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "COUNTS", (10, 20))
    monkeypatch.setattr(convert, "MAIN", 10)


@pytest.mark.usefixtures("few_leaves")
@pytest.mark.parametrize("name", CONVERT_CASES)
def test_ours_and_the_peers_of_the_convert_suite_give_the_same_values(name: str):
    """Each case can be built and run, and its goals name who competes."""
    (case,) = [case for case in convert.cases(quick=False) if case.name == name]
    row = run_case("convert", case, Timing(1, at_least_ns=1, warmups=0))
    check_row(row, "convert")


def test_what_is_made_fresh_is_made_for_each_call_and_not_timed():
    """Each contender gets a new input in each call, and its making does not count."""
    made: list[object] = []
    seen: list[object] = []
    now = [0]

    def fresh() -> object:
        now[0] += 1_000_000
        made.append(object())
        return made[-1]

    def run(given: object) -> None:
        now[0] += 7
        seen.append(given)

    timing = Timing(2, clock=lambda: now[0], at_least_ns=20, warmups=1)
    samples = alternate({"ours": run, "peer": run}, timing, fresh=fresh)
    assert samples == {"ours": [7.0, 7.0], "peer": [7.0, 7.0]}
    assert seen == made
    assert len({*map(id, made)}) == len(made)


@pytest.mark.usefixtures("few_leaves")
def test_quick_leaves_the_largest_trees_of_the_convert_suite_out():
    """The others stay, in their order."""
    names = [case.name for case in convert.cases(quick=True)]
    assert names == [name for name in CONVERT_CASES if "-20" not in name]


@pytest.mark.usefixtures("few_leaves")
def test_an_optional_peer_that_is_absent_is_noted_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """No goal names it then, and the rest is timed all the same."""
    monkeypatch.setattr(convert, "HAS_TORCH2JAX", False)
    monkeypatch.setattr(convert, "BINDINGS", None)
    row = run_case("convert", next(iter(convert.cases(quick=True))), Timing(1, at_least_ns=1))
    assert (set(row["peers"]), row["goal"]) == (
        {"from_dlpack"},
        "ours <= 0.2 * peers['from_dlpack']",
    )
    note = capsys.readouterr().err
    assert "wrap_torch2jax is not installed" in note
    assert "DLPack binding" in note


# The suite "loaders"

LOADER_CASES = """
leaves-3-workers-0 packed-3-workers-0 leaves-3-workers-2 packed-3-workers-2 overlap-3
leaves-4-workers-0 packed-4-workers-0 leaves-4-workers-2 packed-4-workers-2 overlap-4
""".split()


@pytest.fixture
def short_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "BATCHES", {3: 4, 4: 8, 5: 4})


@pytest.mark.usefixtures("short_epochs")
# Grain and the fork of torch leave what is theirs to the collector.
@pytest.mark.filterwarnings("ignore:os.fork")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if "workers-2" in name else ())
        for name in LOADER_CASES[:5]
        if name != "packed-3-workers-2"  # each takes a quarter of a minute
    ],
)
def test_ours_and_the_peers_of_the_loaders_suite_give_the_same_rows(name: str):
    """Each case can be built and run, and its goals name who competes."""
    (case,) = [case for case in loaders.cases(quick=False) if case.name == name]
    row = run_case("loaders", case, Timing(1, at_least_ns=1, warmups=0))
    check_row(row, "loaders", "ms")


@pytest.mark.usefixtures("short_epochs")
def test_quick_leaves_the_most_leaves_of_the_loaders_suite_out():
    """The others stay, in their order."""
    assert [case.name for case in loaders.cases(quick=True)] == LOADER_CASES


@pytest.mark.usefixtures("short_epochs")
def test_a_loader_that_is_not_installed_is_noted_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """No goal names it then."""
    monkeypatch.setattr(_loader_peers, "HAS_JAX_DATALOADER", False)
    case = next(iter(loaders.cases(quick=True)))
    assert {goal.against for goal in case.goals} == set(case.build().peers)
    assert "jax-dataloader is not installed" in capsys.readouterr().err


def test_the_rows_of_an_epoch_are_compared_in_the_order_of_the_table():
    """Batches of any order are the same epoch; another row is another one."""
    first, second = ({"x": np.array([[i, 9]], np.float32)} for i in range(2))
    ordered = loaders._rows([first, second])
    assert difference(ordered, loaders._rows([second, first])) is None
    assert difference(ordered, loaders._rows([second, second])) is not None


def test_contenders_rest_before_each_sample(clock: FakeClock, monkeypatch: pytest.MonkeyPatch):
    """Outside of the sample, so that what another one left running is over by then."""
    rest = clock.contender("rest", 100)
    monkeypatch.setattr(time, "sleep", lambda _: rest())
    samples = alternate({"ours": clock.contender("ours", 1)}, clock.timing(2), rest=0.5)
    assert samples == {"ours": [1.0, 1.0]}
    assert clock.calls[-4:] == ["rest", "ours", "rest", "ours"]


def check_row(row: Row, suite: str, unit: str = "us") -> None:
    """Assert the schema of a row; no time of it."""
    assert set(row) == ROW_KEYS
    assert (row["suite"], row["unit"]) == (suite, unit)
    floor = set() if row["floor"] is None else {"floor"}
    assert set(row["spread"]) == {"ours", *row["peers"]} | floor
    assert (row["met"] is None) == (row["goal"] is None)
    for low, high in row["spread"].values():
        assert 0 < low <= high


@pytest.mark.parametrize("module", [case, compare, report, timing])
def test_the_examples_in_the_docstrings_run(module):
    """Every ``>>>`` gives what stands below it."""
    assert doctest.testmod(module).failed == 0
