"""The plugins themselves: what they pass to ours, what to stock, and how they count it."""

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as torch_pytree
from tensordict import LazyStackedTensorDict, PersistentTensorDict, TensorDict, tensorclass

import tdbridge
from tests import zoo
from tests.peers import tensordict_consolidate, tensordict_pytree
from tests.peers.swap import NotServed, Tally, reason, swapped

pytest_plugins = ["pytester"]


# --- counting


def refuse(*args: Any) -> Any:
    raise NotServed(f"{args}")


def test_what_ours_serves_is_counted_for_ours():
    """A call that ours answers is counted once, and stock is not asked."""
    tally = Tally()
    assert swapped(lambda x: x + 1, refuse, tally)(1) == 2
    assert tally == {("ours", ""): 1}


def test_what_ours_refuses_goes_to_stock_with_the_same_arguments():
    """A refused call gets stock's answer, and the reason is counted."""
    tally = Tally()
    call = swapped(refuse, lambda *args: args, tally)
    assert [call(1, 2), call(1, 2), call(3)] == [(1, 2), (1, 2), (3,)]
    assert tally == {("stock", "(1, 2)"): 2, ("stock", "(3,)"): 1}


def test_an_error_of_ours_is_not_hidden_by_stock():
    """Only the errors that were named as refusals go to stock; a bug of ours is raised."""
    tally = Tally()
    with pytest.raises(ZeroDivisionError):
        swapped(lambda x: 1 / x, abs, tally, (KeyError,))(0)
    assert not tally
    assert swapped(lambda x: 1 / x, abs, tally, (ZeroDivisionError,))(0) == 0
    assert tally == {("stock", "division by zero"): 1}


def test_what_stock_calls_itself_stays_with_stock():
    """One call from outside is one count, however often stock comes by again."""
    tally = Tally()
    call = swapped(
        lambda n: refuse() if n == 2 else "ours", lambda n: call(n - 1) if n else "end", tally
    )
    assert call(2) == "end"
    assert tally == {("stock", "()"): 1}
    assert call(1) == "ours"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("['a']: got a nested tensor: pad it.", "got a nested tensor: pad it."),
        ("['b']['c']: got a nested tensor: pad it.", "got a nested tensor: pad it."),
        ("got a NonTensorStack.", "got a NonTensorStack."),
        ("option inplace", "option inplace"),
    ],
)
def test_a_reason_does_not_name_the_leaf(message, expected):
    """Refusals that differ by the leaf's path alone are counted together."""
    assert reason(ValueError(message)) == expected


# --- consolidate


@pytest.mark.parametrize(
    "option",
    ["non_blocking", "inplace", "return_early", "use_buffer", "share_memory", "pin_memory"],
)
def test_an_option_that_ours_lacks_is_refused(option):
    """It is refused when it is asked for, and not when its default is spelled out."""
    td = TensorDict(a=torch.ones(3))
    with pytest.raises(NotServed, match=f"^option {option}$"):
        tensordict_consolidate.consolidate(td, **{option: True})
    assert tensordict_consolidate.consolidate(td, **{option: False}).is_consolidated()


def test_the_options_of_ours_reach_it(tmp_path):
    """The file may be given by position; metadata and num_threads change nothing."""
    td = TensorDict(a=torch.ones(3), device="cpu")
    made = tensordict_consolidate.consolidate(td, tmp_path / "f", num_threads=4, metadata=True)
    assert (
        TensorDict.from_consolidated(tmp_path / "f")["a"].tolist() == [1, 1, 1] == list(made["a"])
    )
    assert tensordict_consolidate.consolidate(td, device="meta")["a"].is_meta


def test_a_file_for_a_tree_without_a_device_is_refused(tmp_path):
    """Stock's result then says cpu, which its file does not hold; ours says what the tree did."""
    td = TensorDict(a=torch.ones(3))
    with pytest.raises(NotServed, match=r"^a file for a tree without a device"):
        tensordict_consolidate.consolidate(td, filename=tmp_path / "f")
    assert td.consolidate(filename=tmp_path / "f").device == torch.device("cpu")
    assert TensorDict.from_consolidated(tmp_path / "f").device is None
    assert tdbridge.consolidate(td, filename=tmp_path / "g").device is None


@pytest.fixture
def tally():
    """What is counted while ours stands in for `consolidate`."""
    tally = Tally()
    with pytest.MonkeyPatch.context() as patch:
        tensordict_consolidate.swap(patch, tally)
        yield tally


def test_a_tensordict_and_a_tensorclass_are_served(tally):
    """Each is one call of ours, whether its class was defined before the swap or after it."""

    @tensorclass
    class Later:
        x: torch.Tensor

    trees = [
        TensorDict(x=torch.ones(3)),
        zoo.Step(obs=torch.ones(2, 3), label="a", batch_size=[2]),
        Later(x=torch.ones(2), batch_size=[2]),  # pyright: ignore[reportCallIssue]
    ]
    for tree in trees:
        made = tree.consolidate()
        assert type(made) is type(tree)
        assert made.is_consolidated()
    assert tally == {("ours", ""): 3}


def test_a_kind_that_ours_refuses_is_left_to_stock(tally):
    """A stack of another kind comes back from stock."""

    class Rows(LazyStackedTensorDict):
        pass

    rows = Rows(TensorDict(x=torch.ones(3)), TensorDict(x=torch.zeros(3)))
    assert rows.consolidate()["x"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert [why[:28] for _, why in tally] == ["got a Rows, a stack of anoth"]
    assert tally.total() == 1


def test_nothing_is_left_behind():
    """After the run `consolidate` is stock's again."""
    before = TensorDict.consolidate, zoo.Step.consolidate
    with pytest.MonkeyPatch.context() as patch:
        tensordict_consolidate.swap(patch, Tally())
        assert before[0] is not TensorDict.consolidate
        assert before[1] is not zoo.Step.consolidate
    assert before == (TensorDict.consolidate, zoo.Step.consolidate)


def test_the_consolidate_plugin_reports(pytester):
    """The counts stand at the end of the run, with a line per reason."""
    pytester.makepyfile("""
        import torch
        from tensordict import TensorDict

        def test_both():
            td = TensorDict(a=torch.ones(3))
            td.consolidate(inplace=True)
            td.clone().consolidate(num_threads=2)
    """)
    result = pytester.runpytest_inprocess("-p", "tests.peers.tensordict_consolidate")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "*tdbridge.consolidate*",
            "served by ours: 1",
            "left to stock: 1",
            "     1  option inplace",
        ]
    )


# --- pytrees

REGISTRIES = sorted(tensordict_pytree.REGISTRIES)
HERE = str(Path(__file__).parent)


@pytest.mark.parametrize("registry", REGISTRIES)
def test_a_call_from_the_tests_is_served_by_the_registry(registry):
    """Values and paths are those of torch's own functions; calls from elsewhere are torch's."""
    td = TensorDict(a=torch.ones(2), b=TensorDict(c=torch.zeros(2)))
    tally, elsewhere, paths = Tally(), Tally(), []
    with pytest.MonkeyPatch.context() as patch:
        tensordict_pytree.swap(patch, registry, HERE, tally)
        made = torch_pytree.tree_map(lambda x, y: x + y, [td], [td + 1])[0]
        torch_pytree.tree_map_with_path(lambda path, _: paths.append([k.key for k in path]), td)
    with pytest.MonkeyPatch.context() as patch:
        tensordict_pytree.swap(patch, registry, "/elsewhere", elsewhere)
        torch_pytree.tree_map(lambda x: x, td)
    assert made["a"].tolist() == [3, 3]
    assert made["b", "c"].tolist() == [1, 1]
    assert paths == [["a"], ["b", "c"]]
    assert tally == {("ours", ""): 2}
    assert not elsewhere


@pytest.mark.parametrize("registry", REGISTRIES)
@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({"a": torch.ones(1)}, "no TensorDict in the tree"),
        ([TensorDict(a=torch.ones(1), device="cpu")], "a device, which our definition"),
        (
            PersistentTensorDict(filename=BytesIO(), batch_size=[], mode="w"),
            "a PersistentTensorDict, which is a leaf",
        ),
    ],
)
def test_a_tree_that_says_nothing_of_ours_is_refused(registry, tree, why):
    """Trees without a node of ours, or with what it does not keep, are not counted for ours."""
    leaves_of, _ = tensordict_pytree.REGISTRIES[registry]
    with pytest.raises(NotServed, match=f"^{why}"):
        tensordict_pytree.check(tree, leaves_of)


def test_keys_that_jax_cannot_sort_are_refused():
    """JAX sorts the keys of a dict; optree falls back to another order."""
    tree = {"a": TensorDict(x=torch.ones(1)), object(): 1}
    with pytest.raises(NotServed, match=r"^a dict whose keys JAX cannot sort$"):
        tensordict_pytree.check(tree, tensordict_pytree.REGISTRIES["jax"][0])
    tensordict_pytree.check(tree, tensordict_pytree.REGISTRIES["optree"][0])


@pytest.mark.parametrize("registry", REGISTRIES)
def test_the_pytree_plugin_reports(pytester, registry):
    """A name that the test file has imported from torch is swapped too."""
    pytester.makepyfile("""
        import torch
        from tensordict import TensorDict
        from torch.utils._pytree import tree_map

        def test_both():
            assert tree_map(lambda x: x + 1, TensorDict(a=torch.ones(3)))["a"].sum() == 6
            assert tree_map(lambda x: x + 1, {"a": 1}) == {"a": 2}
    """)
    result = pytester.runpytest_inprocess(
        "-p", "tests.peers.tensordict_pytree", "--registry", registry
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            f"*pytrees of {registry}*",
            "served by ours: 1",
            "left to stock: 1",
            "     1  no TensorDict in the tree",
        ]
    )
