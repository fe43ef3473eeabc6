"""Stock tensordict and torch read a consolidated tree with their own code."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, UnbatchedTensor

from tdbridge import consolidate, layout_of
from tdbridge._compat.tensordict import tensordict_of
from tdbridge.layout.dtypes import dtype_of
from tests import zoo
from tests.layout.check import (
    assert_aligned,
    assert_leaves_in_one_buffer,
    assert_same_leaves,
    assert_same_nodes,
    places,
)

# torch.load(weights_only=True) refuses the classes of others until they are allowed.
ALLOWED = [
    *(zoo.Step, zoo.Batch, np.ndarray, np.dtype, np.dtypes.Int64DType),
    *(np._core.multiarray._reconstruct, np._core.numeric._frombuffer),  # type: ignore[attr-defined]
]


def by_torch(tree: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    with torch.serialization.safe_globals(ALLOWED):
        return torch.load(file, **options)


def by_pickle(tree: Any) -> Any:
    return pickle.loads(pickle.dumps(tree))


def by_weights_only(tree: Any) -> Any:
    return by_torch(tree, weights_only=True)


def by_torch_save(tree: Any) -> Any:
    return by_torch(tree, weights_only=False)


ROUTES: list[Callable[[Any], Any]] = [by_pickle, by_torch_save, by_weights_only]
# What stock pickles in other ways than most: another class, dtypes and names it lacks words for.
SPECIAL = ["flat", "tensorclass_inside", "subclass", "all_dtypes", "reserved_keys"]


def test_torch_itself_does_not_pickle_float8():
    """A consolidated tree can be pickled where torch cannot pickle its leaves."""
    with pytest.raises(AttributeError, match="UntypedStorage"):
        by_pickle(zoo.pattern("float8_e4m3fn", 2))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", zoo.TREES)
def test_a_tree_survives(name, route):
    """Values bit for bit, leaves aligned and in one buffer, the tree as it was, locked."""
    found = route(consolidate(zoo.TREES[name]()))
    assert_same_leaves(found, zoo.expected(name))
    assert_same_nodes(found, zoo.TREES[name](), order=False)
    assert_leaves_in_one_buffer(found)
    assert found.is_locked


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", SPECIAL)
def test_a_tree_that_came_back_is_whole(name, route):
    """What it calls its buffer is the memory of its leaves: a write to one moves with the tree."""
    found = route(consolidate(zoo.TREES[name]()))
    for leaf in zoo.leaves(found).values():
        if leaf.numel():
            leaf.reshape(-1).view(torch.uint8).zero_()
    for path, leaf in zoo.leaves(found.to("cpu")).items():
        assert not any(zoo.as_numpy(leaf).tobytes()), path


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_saved_tree_can_be_mapped(name, tmp_path):
    """torch.load(mmap=True) gives leaves that lie in the file, aligned."""
    torch.save(consolidate(zoo.TREES[name]()), tmp_path / "file")
    with torch.serialization.safe_globals(ALLOWED):
        found = torch.load(tmp_path / "file", weights_only=True, mmap=True)
    assert_same_leaves(found, zoo.expected(name))
    assert_aligned(found)


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_pickle_holds_the_buffer_once(name):
    """The pickle of a tree grows by a byte for each byte of its buffer, not once per leaf."""
    tree = consolidate(zoo.TREES[name]())
    file = io.BytesIO()
    torch.save(tree, file)
    layout = layout_of(tree)
    entries = len(layout.leaves) + len(layout.nodes)
    assert file.tell() < 4096 + layout.nbytes + 256 * entries
    assert len(pickle.dumps(tree)) < 4096 + layout.nbytes + 256 * entries


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_tree_moves(name):
    """`to(device)` gives a consolidated tree there, every leaf in its place."""
    assert_same_leaves(consolidate(zoo.TREES[name]()).to("cpu"), zoo.expected(name))
    moved = consolidate(zoo.TREES[name]()).to("meta")
    assert moved.is_consolidated()
    arrays = zoo.expected(name)
    starts, _ = places(arrays)
    leaves = zoo.leaves(moved)
    for path, array in arrays.items():
        leaf = leaves[path]
        assert leaf.device.type == "meta"
        assert (dtype_of(leaf.dtype).name, tuple(leaf.shape)) == (array.dtype.name, array.shape)
        assert leaf.storage_offset() * leaf.itemsize == starts[path]


@pytest.mark.parametrize("name", [*SPECIAL, "non_tensors"])
def test_an_update_in_place_lands_in_the_buffer(name):
    """`update_` writes into the leaves, and the tree stays consolidated."""
    tree = consolidate(zoo.TREES[name]())
    for leaf in zoo.leaves(tree).values():
        if leaf.numel():
            leaf.reshape(-1).view(torch.uint8).zero_()
    tensordict_of(tree).update_(TensorDict(zoo.leaves(zoo.TREES[name]()), tree.batch_size))
    assert_same_leaves(tree, zoo.expected(name))
    assert_leaves_in_one_buffer(tree)


def test_the_metadata_is_what_stock_reads():
    """Per leaf (dtype, shape, start, stop, pad): exact sizes, no pad, in units of the dtype."""
    metadata = consolidate(zoo.nested())._consolidated["metadata"]
    assert metadata["leaves"] == {"obs": ("torch.float32", [4, 3], 128, 176, 0)}
    assert metadata["next"]["leaves"] == {
        "reward": ("torch.float32", [4], 64, 80, 0),
        "done": ("torch.bool", [4, 1], 0, 4, 0),
    }
    assert metadata["deep"]["er"]["leaves"] == {"est": ("torch.int16", [4, 2], 192, 208, 0)}
    stock = zoo.nested().lock_().consolidate(metadata=True)._consolidated["metadata"]

    def without_leaves(node: dict[str, Any]) -> dict[str, Any]:
        inner = {k: without_leaves(v) if isinstance(v, dict) else v for k, v in node.items()}
        return {**inner, "leaves": set(node["leaves"])} if "leaves" in node else inner

    assert without_leaves(metadata) == without_leaves(stock)


def test_two_results_do_not_share_metadata():
    """Stock writes into it (broadcast, a new batch size), so each result has its own."""
    first, second = consolidate(zoo.deeper_batch()), consolidate(zoo.deeper_batch())
    first.batch_size = []
    first.batch_size = [2]
    first["inner"].batch_size = [2]
    first._consolidated["metadata"]["inner"]["cls_metadata"]["batch_size"] = [2]
    first._consolidated["metadata"]["_total_bytes"] = 0
    assert_same_nodes(by_pickle(second), zoo.deeper_batch(), order=False)
    assert_same_nodes(by_pickle(consolidate(zoo.deeper_batch())), zoo.deeper_batch(), order=False)


def test_consolidating_again_records_a_new_batch_size():
    """As with stock, it is what writes a batch size that was set inside into the pickle."""
    tree = consolidate(zoo.deeper_batch())
    tree["inner"].batch_size = [2]
    assert consolidate(tree) is tree
    assert by_pickle(tree)["inner"].batch_size == (2,)


@pytest.mark.parametrize("key", ["size", "plain"])
def test_a_new_batch_size_and_name_of_the_root_are_recorded(key):
    """Stock writes them into the metadata when they are set, also beside a name of its own."""
    td = TensorDict({key: {"x": torch.ones(2, 3)}, "leaf": torch.ones(2)}, [2])
    td.set_non_tensor("entry", "text")
    tree = consolidate(td)
    tree.names = ["time"]
    assert by_pickle(tree).names == ["time"]
    tree.batch_size = []
    found = by_pickle(tree)
    assert found.batch_size == ()
    assert found["entry"] == "text"


def test_consolidating_again_heals_what_stock_wrote():
    """Keys that stock's broadcast leaves in the metadata, after which its pickle fails, go away."""
    tree = consolidate(zoo.flat())
    tree._consolidated["metadata"]["_total_bytes"] = 128
    with pytest.raises((TypeError, AttributeError, ValueError, KeyError)):
        by_pickle(tree)
    assert_same_leaves(by_pickle(consolidate(tree)), zoo.expected("flat"))


@pytest.mark.parametrize("prefix", ["<NJT>", "<NJT_VALUES>", "<NJT_LENGTHS>", "<NJT_OFFSETS>"])
def test_a_leaf_with_a_name_of_stocks_own_survives(prefix):
    """Stock gives keys that start so another meaning; the leaf comes back all the same."""
    td = TensorDict({prefix + "x": torch.arange(3.0), "y": torch.ones(2)})
    for route in ROUTES:
        found = route(consolidate(td))
        assert set(found.keys()) == {prefix + "x", "y"}
        assert found[prefix + "x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("key", ["size", "cls", "leaves", "non_tensors", "cls_metadata"])
def test_any_entry_may_have_a_name_of_stocks_own(key):
    """A leaf, a non-tensor entry or a nested tensordict named so comes back."""
    leaf, entry, tree = torch.arange(3.0), NonTensorData("text"), TensorDict({"x": torch.ones(2)})
    for value in (leaf, entry, tree):
        td = TensorDict({"other": torch.zeros(1)})
        td[key] = value
        for route in ROUTES:
            found = route(consolidate(td))
            assert_same_nodes(found, td, order=False)
            assert_same_leaves(found, {p: zoo.as_numpy(t) for p, t in zoo.leaves(td).items()})


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_deep_copy_is_a_tree_of_its_own(name):
    """copy.deepcopy shares no memory and loses nothing."""
    tree = consolidate(zoo.TREES[name]())
    found = copy.deepcopy(tree)
    for leaf in zoo.leaves(tree).values():
        if leaf.numel():
            leaf.reshape(-1).view(torch.uint8).zero_()
    assert_same_leaves(found, zoo.expected(name))
    assert_same_nodes(found, zoo.TREES[name](), order=False)


def test_stock_functions_of_a_consolidated_tree_work():
    """Indexing, stacking, cloning and casting see the values, and the tree is left as it was."""
    tree = consolidate(zoo.nested())
    stacked: Any = torch.stack([tree, tree])
    assert stacked["next", "reward"].tolist() == [[1, 2, 3, 4]] * 2
    assert tree[1:3]["next", "reward"].tolist() == [2, 3]
    assert tree.to(torch.float64)["obs"].dtype == torch.float64
    clone = tree.clone()
    clone["obs"].zero_()
    assert not clone.is_locked
    assert_same_leaves(tree, zoo.expected("nested"))
    assert not isinstance(tree["obs"], UnbatchedTensor)
