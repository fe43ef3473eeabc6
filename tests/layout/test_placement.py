"""What consolidate() remembers of its result, and when it is not believed."""

import copy
import gc
import pickle
import re
import weakref

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from tdbridge import LayoutError, consolidate
from tdbridge.layout.buffer import placement_for
from tdbridge.layout.placement import placement_of
from tdbridge.layout.plan import constants_of, layout_of
from tdbridge.layout.tree import tree_of
from tests import zoo
from tests.layout.check import assert_same_leaves, places


@pytest.mark.parametrize("name", zoo.TREES)
def test_it_is_what_a_walk_over_the_tree_finds(name):
    """Layout, constants, buffer, and the leaves in the order of the layout."""
    c = consolidate(zoo.TREES[name]())
    expected = zoo.expected(name)
    starts, nbytes = places(expected)
    for tree in (c, consolidate(c), pickle.loads(pickle.dumps(c))):
        placement = placement_for(tree)
        assert placement is not None
        assert placement.whole == layout_of(zoo.TREES[name]())
        assert placement.constants == constants_of(tree_of(zoo.TREES[name]()))
        assert placement.storage.numel() == nbytes
        paths = [leaf.path for leaf in placement.layout.leaves]
        assert paths == sorted(starts, key=lambda path: (expected[path].dtype.name, path))
        for path, leaf in zip(paths, placement.leaves, strict=True):
            assert zoo.same_bits(zoo.as_numpy(leaf), expected[path]), path
            own = zoo.leaves(tree)[path]
            assert leaf.data_ptr() == own.data_ptr(), path
            if own.numel():
                assert own.data_ptr() - placement.storage.data_ptr() == starts[path]
        assert placement.holds


@pytest.mark.parametrize("name", ["nested", "all_dtypes", "zero_size", "empty"])
def test_segments(name):
    """One flat tensor per dtype, in the order of the buffer; together they are the buffer."""
    placement = placement_of(consolidate(zoo.TREES[name]()))
    assert placement is not None
    dtypes = [str(s.dtype).removeprefix("torch.") for s in placement.segments]
    assert dtypes == sorted({array.dtype.name for array in zoo.expected(name).values()})
    at = placement.storage.data_ptr()
    for segment in placement.segments:
        assert segment.ndim == 1
        if segment.numel():
            assert segment.data_ptr() == at
        at += segment.nbytes
    assert at == placement.storage.data_ptr() + placement.storage.numel()


def tree() -> TensorDict:
    td = TensorDict(
        {"x": torch.ones(4, 3), "n": {"y": torch.ones(4, 3), "d": {"z": torch.ones(4, 3)}}}
    )
    td.set_non_tensor("s", "text")
    return td


CHANGES = {
    "unlocked": lambda c: c.unlock_().lock_(),
    "root batch": lambda c: setattr(c, "batch_size", [4]),
    "nested batch": lambda c: setattr(c["n", "d"], "batch_size", [4, 3]),
    "names": lambda c: (setattr(c["n"], "batch_size", [4]), setattr(c["n"], "names", ["t"])),
    "constant": lambda c: c.get("s").update_(NonTensorData("new")),
    "memmap_": lambda c: c.memmap_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tree_that_changed_is_not_known(change):
    """Whatever tensordict lets change under a lock, or drops the lock for."""
    c = consolidate(tree())
    assert placement_of(c) is not None
    CHANGES[change](c)
    assert placement_of(c) is None


@pytest.mark.parametrize("change", ["root batch", "nested batch", "names"])
def test_it_is_found_anew(change):
    """A tree of other batch sizes or names still lies in its buffer, and has another layout."""
    c = consolidate(tree())
    CHANGES[change](c)
    found = placement_for(c)
    assert found is not None
    assert found.whole == layout_of(c) != layout_of(tree())
    assert placement_of(consolidate(c)) is not None


def test_a_leaf_that_was_moved():
    """`.data =` is possible under any lock: the tree is no buffer any more."""
    c = consolidate(tree())
    placement = placement_of(c)
    assert placement is not None
    c["x"].add_(1)
    assert placement.holds
    c["n", "y"].data = torch.zeros(4, 3)
    assert not placement.holds
    before = c["x"].clone()
    with pytest.raises(LayoutError, match="`out`, a TensorDict, is no result"):
        consolidate(tree(), out=c)
    assert torch.equal(c["x"], before)
    new = consolidate(c)
    assert new is not c
    assert new["n", "y"].sum() == 0


def test_a_buffer_that_moves_as_a_whole():
    """`share_memory_()` moves storage and leaves together: it is found there, and refilled."""
    c = consolidate(tree().exclude("s"))
    c.share_memory_()
    found = placement_for(c)
    assert found is not None
    assert found.leaves[0].data_ptr() in {leaf.data_ptr() for leaf in zoo.leaves(c).values()}
    assert consolidate(tree().exclude("s") * 5, out=c)["x"].unique().tolist() == [5.0]


def test_what_is_made_of_a_consolidated_tree_has_none():
    """Clones, copies, slices, parts, and what stock consolidated itself."""
    c = consolidate(tree())
    made = [
        c.clone(),
        c.clone(False),
        copy.copy(c),
        copy.deepcopy(c),
        c["n"],
        c.select("x").lock_(),
    ]
    made += [tree().consolidate(metadata=True), pickle.loads(pickle.dumps(c)), tree()]
    assert [placement_of(td) for td in made] == [None] * len(made)
    unpickled = consolidate(pickle.loads(pickle.dumps(c)))
    assert placement_of(unpickled) is not None
    assert placement_of(unpickled["n"]) is None
    assert placement_for(unpickled["n"]) is None


def test_a_refill_sees_the_present_tree():
    """`out` is compared as it is now: names that it was given since count, on both sides."""
    out, source = consolidate(tree()), tree()
    CHANGES["names"](out)
    with pytest.raises(LayoutError, match=re.escape("at ['n']")):
        consolidate(source, out=out)
    CHANGES["names"](source)
    source["x"].zero_()
    assert consolidate(source, out=out)["x"].sum() == 0


def test_a_refill_from_a_tree_whose_leaves_lie_in_the_buffer():
    """The leaves of `out` are their own source: nothing changes."""
    out = consolidate(zoo.nested())
    assert consolidate(out, out=out) is out
    assert consolidate(TensorDict(out.to_dict(), [4], names=["time"]), out=out) is out
    assert_same_leaves(out, zoo.expected("nested"))


def test_it_does_not_travel():
    """A pickle below protocol 5 names nothing of ours; what is read from it has no placement."""
    data = pickle.dumps(consolidate(tree()), protocol=4)
    assert b"tdbridge" not in data
    assert placement_of(pickle.loads(data)) is None


def test_it_keeps_nothing_alive():
    """The tree and its buffer go when nobody holds them, at once."""
    c = consolidate(tree())
    root, leaf = weakref.ref(c), weakref.ref(c["x"])
    assert placement_of(c) is not None
    gc.disable()
    try:
        del c
        assert root() is None
        assert leaf() is None
    finally:
        gc.enable()
