"""The suite "collectives", whose cases run on two ranks."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from benchmarks.case import BenchmarkError, Case, Contenders
from benchmarks.runner import run_case
from benchmarks.suites import _second_rank, collectives
from benchmarks.timing import Timing

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("multiprocess")]
ONCE = Timing(1, at_least_ns=1, warmups=0)
CASES = """
all_reduce-10 all_reduce-10-apart all_reduce-large broadcast-10 all_gather-10 all_gather-10-list
all_gather-10-out pickle-10 pickle-10-arraydict pickle-10-packed
""".split()


@pytest.fixture(autouse=True)
def few_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "COUNT", 10)
    monkeypatch.setattr(collectives, "LARGE", 100)


@pytest.fixture(scope="module")
def second_rank() -> Iterator[None]:
    yield
    _second_rank.close()
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", CASES)
def test_ours_and_the_peers_give_the_same_values(name: str, second_rank: None):
    """Each case can be built and run, and its goals name who competes."""
    (case,) = [case for case in collectives.cases(quick=True) if case.name == name]
    row = run_case("collectives", case, ONCE)
    assert row["ours"] > 0
    assert (row["goal"] is None) == (name == "all_reduce-10-apart")


def test_quick_leaves_ray_out():
    """The others stay, in their order; behind them come those of Ray, where it is installed."""
    assert [case.name for case in collectives.cases(quick=True)] == CASES
    more = ["ray-10", "ray-10-consolidated"] if collectives.HAS_RAY else []
    assert [case.name for case in collectives.cases(quick=False)] == CASES + more


def test_ray_that_is_not_installed_is_noted_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(collectives, "HAS_RAY", False)
    assert [case.name for case in collectives.cases(quick=False)] == CASES
    assert "ray is not installed" in capsys.readouterr().err


def counted() -> Contenders:
    """Ours says how often both ranks have run it, the peer always says six."""
    seen = torch.zeros(1)

    def run() -> torch.Tensor:
        seen.add_(1)
        both = seen.clone()
        dist.all_reduce(both)
        return both

    return Contenders(run, {"six": lambda: torch.full((1,), 6.0)})


def test_both_ranks_run_a_contender_as_often_as_it_is_called(second_rank: None):
    """Three times in one call; in another call it is no longer six."""
    contenders = _second_rank.on_two_ranks(counted, times=3)
    assert contenders.times == 3
    assert contenders.ours().tolist() == [6.0]
    assert contenders.ours().tolist() == [12.0]


def test_values_are_compared_on_two_ranks_too(second_rank: None):
    """The second run of the case starts anew, and its count after two calls is four."""
    case = Case("wrong", lambda: _second_rank.on_two_ranks(counted, times=2))
    with pytest.raises(BenchmarkError, match="different values"):
        run_case("collectives", case, ONCE)


def test_the_row_has_the_time_of_once():
    """Of a call that does the work four times, a quarter."""
    now = [0]

    def run() -> None:
        now[0] += 400

    case = Case("case", lambda: Contenders(run, times=4, values=lambda _: {}), unit="ns")
    row = run_case("suite", case, Timing(3, clock=lambda: now[0], at_least_ns=1, warmups=0))
    assert row["ours"] == 100
    assert row["spread"] == {"ours": [100, 100]}
