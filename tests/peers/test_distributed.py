"""The plugin for distributed tests: what runs on ours in their processes, and how it is counted."""

from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from tensordict import LazyStackedTensorDict, TensorDict

from tests.peers import tensordict_distributed
from tests.peers.swap import Tally

pytest_plugins = ["pytester"]


@pytest.fixture
def tallies():
    """What is counted while ours stands in, in a group of this process alone."""
    tallies = defaultdict(Tally)
    store = dist.HashStore()  # type: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        tensordict_distributed.swap(patch, tallies)
        yield tallies
    dist.destroy_process_group()


def counted(tallies):
    return {name: dict(tally) for name, tally in tallies.items() if tally.total()}


def test_an_operation_that_consolidates_is_served_by_ours(tallies):
    """Each counts its own calls; what the test consolidates itself counts apart."""
    td = TensorDict(a=torch.ones(3), b=torch.ones(5))
    made = td.broadcast(src=0)
    gathered = td.all_gather()
    scattered = td.scatter(src=0, tensordicts=[td])
    td.consolidate()
    assert made["b"].data_ptr() - made["a"].data_ptr() == 64  # stock pads to 8 bytes
    assert [t["b"].tolist() for t in (gathered[0], scattered)] == [[1] * 5] * 2
    once = {("ours", ""): 1}
    assert counted(tallies) == {
        "broadcast": once,
        "all_gather": once,
        "scatter": once,
        "consolidate": once,
    }


def test_the_leaves_of_other_operations_are_put_into_a_buffer_of_ours(tallies):
    """The tree stays the object that the test holds, and sees the result."""
    td = TensorDict(a=torch.full((3,), 2.0), b=TensorDict(c=torch.ones(5)))
    inner = td["b"]
    td.all_reduce()
    assert td["b"] is inner
    assert td["a"].tolist() == [2, 2, 2]
    assert td["a"].untyped_storage().data_ptr() == inner["c"].untyped_storage().data_ptr()
    assert counted(tallies) == {"all_reduce": {("ours", ""): 1}}


def test_leaves_that_ours_refuses_stay_where_they_are(tallies):
    """The operation works on them all the same, and the reason is counted."""

    class Rows(LazyStackedTensorDict):
        pass

    leaf = torch.ones(3)
    rows = Rows(TensorDict(x=leaf), TensorDict(x=torch.zeros(3)))
    rows.all_reduce()
    assert rows.tensordicts[0]["x"] is leaf
    ((side, why),) = tallies["all_reduce"]
    assert (side, why[:28]) == ("stock", "got a Rows, a stack of anoth")


def test_nothing_is_left_behind():
    """After the run the operations are stock's again."""
    before = TensorDict.broadcast, TensorDict.send
    with pytest.MonkeyPatch.context() as patch:
        tensordict_distributed.swap(patch, defaultdict(Tally))
        assert before[0] is not TensorDict.broadcast
        assert before[1] is not TensorDict.send
    assert before == (TensorDict.broadcast, TensorDict.send)


def test_the_counts_of_processes_are_summed(tmp_path):
    """Each process appends its own; an operation without a call is left out."""
    counts = tmp_path / "counts"
    one, no = Tally({("ours", ""): 1}), Tally({("stock", "no"): 2})
    tensordict_distributed.write(counts, {"send": one, "recv": Tally()})
    tensordict_distributed.write(counts, {"send": one + no})
    lines = counts.read_text().splitlines()
    assert tensordict_distributed.read(lines) == {"send": one + one + no}


def test_processes_that_a_test_starts_run_on_ours(pytester):
    """Also one that fails is counted; the process of the test itself stays with stock."""
    pytester.makepyfile("""
        import multiprocessing

        import torch
        import torch.distributed as dist
        from tensordict import TensorDict

        def work(fails):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            td = TensorDict(a=torch.ones(3))
            td.all_reduce()
            td.consolidate(inplace=True)
            assert not fails

        def run(*args, **options):
            spawn = multiprocessing.get_context("spawn")
            process = spawn.Process(target=work, args=args, kwargs=options)
            process.start()
            process.join()
            return process.exitcode

        def test_both():
            assert run(False) == 0
            assert run(fails=True) == 1
            TensorDict(a=torch.ones(3)).consolidate()
    """)
    result = pytester.runpytest_inprocess("-p", "tests.peers.tensordict_distributed")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "*2 processes ran on tdbridge*",
            "*all_reduce*",
            "served by ours: 2",
            "left to stock: 0",
            "*consolidate*",
            "served by ours: 0",
            "left to stock: 2",
            "     2  option inplace",
        ]
    )
