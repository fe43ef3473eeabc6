"""consolidate(td, out=c): the same buffer, filled again."""

import re

import pytest
import torch
from tensordict import TensorDict

import tdbridge
from tdbridge import consolidate
from tdbridge.errors import LayoutError, LeafTypeError
from tests import zoo
from tests.layout.check import assert_leaves_in_one_buffer, assert_same_leaves, assert_same_nodes


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_buffer_is_filled_again(name):
    """`out` itself comes back, its memory where it was, with the values of the new source."""
    out = consolidate(zoo.TREES[name]())
    pointers = [leaf.data_ptr() for leaf in zoo.leaves(out).values()]
    for leaf in zoo.leaves(out).values():
        if leaf.numel():
            leaf.reshape(-1).view(torch.uint8).zero_()
    assert consolidate(zoo.TREES[name](), out=out) is out
    assert [leaf.data_ptr() for leaf in zoo.leaves(out).values()] == pointers
    assert_same_leaves(out, zoo.expected(name))
    assert_same_nodes(out, zoo.TREES[name]())
    assert_leaves_in_one_buffer(out)


def test_the_order_of_the_new_source_does_not_count():
    """Leaves are matched by path, not by position."""
    out = consolidate(TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}))
    consolidate(TensorDict({"b": torch.ones(2), "a": torch.full((2,), 5.0)}), out=out)
    assert out["a"].tolist() == [5, 5]
    assert out["b"].tolist() == [1, 1]
    assert list(out.keys()) == ["a", "b"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda td: td.set("a", torch.zeros(4)),
            "at ['a']: got LeafSpec(path=('a',), dtype='int32'",
        ),
        (lambda td: td.set("b", torch.zeros(4, 2)), "at ['b']: got LeafSpec"),
        (lambda td: td.set("c", torch.zeros(4)), "at ['c']: got None, expected LeafSpec"),
        (lambda td: td.pop("a"), "expected None"),
        (
            lambda td: td.set("n", TensorDict(batch_size=[4])),
            "at ['n']: got None, expected NodeSpec",
        ),
        (lambda td: setattr(td, "names", ["t"]), "expected NodeSpec(path=(), "),
        (lambda td: td.set_non_tensor("s", 1), "at []: got NodeSpec"),
    ],
    ids=["dtype", "shape", "more", "fewer", "node", "names", "constant"],
)
def test_another_layout_is_refused(change, message):
    """A source of another structure raises, naming where, and nothing is written."""
    out, other = consolidate(zoo.flat()), zoo.flat()
    change(other)
    other["b"].zero_()
    with pytest.raises(LayoutError, match=r"^`out` has another layout.*" + re.escape(message)):
        consolidate(other, out=out)
    assert_same_leaves(out, zoo.expected("flat"))


def test_the_value_of_a_constant_is_part_of_the_layout():
    """A batch with another non-tensor value does not go into a buffer that declares the old one."""
    out, other = consolidate(zoo.non_tensors()), zoo.non_tensors()
    other.set_non_tensor("s", "changed")
    with pytest.raises(LayoutError, match="changed"):
        consolidate(other, out=out)


@pytest.mark.parametrize("out", [zoo.flat, lambda: zoo.flat().consolidate(metadata=True)])
def test_out_is_a_result_of_consolidate(out):
    """A tree that does not lie in an aligned buffer raises: the result would not lie in one."""
    with pytest.raises(LayoutError, match="`out`"):
        consolidate(zoo.flat(), out=out())


def test_out_is_no_arraydict():
    """JAX's arrays are immutable, so an ArrayDict cannot be filled."""
    out = tdbridge.to_jax(consolidate(zoo.flat()))
    with pytest.raises((LayoutError, LeafTypeError), match=r"`out`|ArrayImpl"):
        consolidate(zoo.flat(), out=out)


@pytest.mark.parametrize("more", [{"filename": "file"}, {"device": "meta"}])
def test_out_goes_with_nothing_else(more, tmp_path, monkeypatch):
    """`out` has a place already: a file or a device as well is an error, and not ignored."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="out"):
        consolidate(zoo.flat(), out=consolidate(zoo.flat()), **more)


def test_a_refused_leaf_leaves_out_alone():
    """The leaves are checked before the first byte is written."""
    out = consolidate(zoo.flat())
    bad = TensorDict(
        {"b": torch.zeros(4, 3), "a": torch.zeros(4, dtype=torch.int32).to_sparse()}, [4]
    )
    with pytest.raises(LeafTypeError, match=re.escape("['a']: got a tensor of layout")):
        consolidate(bad, out=out)
    assert_same_leaves(out, zoo.expected("flat"))


def test_gradients_do_not_stop_a_refill():
    """A source that requires grad fills the buffer with its values."""
    td = TensorDict({"x": torch.ones(2, requires_grad=True)})
    out = consolidate(td)
    consolidate(TensorDict({"x": torch.full((2,), 3.0, requires_grad=True)}), out=out)
    assert out["x"].tolist() == [3, 3]
    assert not out["x"].requires_grad


@pytest.mark.parametrize("count", [2, 5])
def test_leaves_that_lie_in_the_buffer_itself_are_read_before_they_are_written(count: int):
    """Leaves that change places, alone or in a run of equal ones, end up where they should."""
    keys = [f"x{i}" for i in range(count)]
    c = tdbridge.consolidate(TensorDict({key: torch.full((3,), i) for i, key in enumerate(keys)}))
    turned = TensorDict({key: c[keys[i - 1]] for i, key in enumerate(keys)})
    tdbridge.consolidate(turned, out=c)
    got = [c[key].tolist() for key in keys]
    assert got == [[(i - 1) % count] * 3 for i in range(count)]
    flipped = tdbridge.consolidate(TensorDict(x=torch.arange(4).reshape(2, 2)))
    tdbridge.consolidate(TensorDict(x=flipped["x"].t()), out=flipped)
    assert flipped["x"].tolist() == [[0, 2], [1, 3]]
