"""Where a private function of torch or tensordict is gone, the results are the same."""

import pickle
import re

import pytest
import torch
from tensordict import TensorDict

import tdbridge._compat.tensordict as compat_tensordict
import tdbridge._compat.torch as compat_torch
from tdbridge import consolidate
from tdbridge._compat.tensordict import new_tensordict
from tdbridge.errors import LeafTypeError
from tests import zoo
from tests.layout.check import assert_leaves_in_one_buffer, assert_same_leaves, assert_same_nodes


@pytest.fixture(params=["copies one by one", "public constructors"])
def fallback(request, monkeypatch) -> None:
    """Takes away what the library uses when it is there."""
    assert compat_torch._foreach_copy is not None
    assert compat_tensordict._HAS_NEW_UNSAFE
    if request.param == "copies one by one":
        monkeypatch.setattr(compat_torch, "_foreach_copy", None)
    else:
        monkeypatch.setattr(compat_tensordict, "_HAS_NEW_UNSAFE", False)


@pytest.mark.usefixtures("fallback")
@pytest.mark.parametrize("name", zoo.TREES)
def test_consolidating_gives_the_same(name):
    """Values, places, classes, names, keys and entries are those of the fast way; refilled too."""
    source = zoo.TREES[name]()
    c = consolidate(source)
    assert_same_leaves(c, zoo.expected(name))
    assert_same_nodes(c, zoo.TREES[name]())
    assert_leaves_in_one_buffer(c)
    assert c.is_locked
    assert not source.is_locked
    for leaf in zoo.leaves(c).values():
        if leaf.numel():
            leaf.reshape(-1).view(torch.uint8).zero_()
    assert consolidate(source, out=c) is c
    assert_same_leaves(c, zoo.expected(name))


@pytest.mark.usefixtures("fallback")
def test_names_inside_are_kept():
    """A nested tensordict with names of its own keeps them, whatever its parent's are."""
    inner = TensorDict({"x": torch.zeros(2, 3, 4)}, [2, 3], names=["u", "v"])
    td = TensorDict({"y": torch.zeros(2), "n": TensorDict({}, [2])}, [2])
    td["inner"] = inner
    assert_same_nodes(consolidate(td), td)


@pytest.mark.usefixtures("fallback")
def test_gradients_are_not_carried():
    """Leaves that require grad are copied without a graph."""
    td = TensorDict({"x": torch.ones(3, requires_grad=True)})
    assert not consolidate(td)["x"].requires_grad


@pytest.mark.usefixtures("fallback")
def test_stock_reads_the_result():
    """The pickle is that of a consolidated tree."""
    found = pickle.loads(pickle.dumps(consolidate(zoo.nested())))
    assert_same_leaves(found, zoo.expected("nested"))
    assert_leaves_in_one_buffer(found)


def test_a_leaf_that_is_no_tensor_needs_the_fast_way(monkeypatch):
    """Public constructors validate, so a tree of masks says what to use instead."""
    assert new_tensordict(TensorDict, {"x": True}, batch_size=[])._tensordict == {"x": True}
    monkeypatch.setattr(compat_tensordict, "_HAS_NEW_UNSAFE", False)
    with pytest.raises(LeafTypeError, match=re.escape("'x': this version of tensordict")):
        new_tensordict(TensorDict, {"x": True}, batch_size=[])


def test_copies_of_unequal_length_are_an_error(monkeypatch):
    """No leaf is left out silently."""
    monkeypatch.setattr(compat_torch, "_foreach_copy", None)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        compat_torch.copy_all([torch.zeros(1)], [])
