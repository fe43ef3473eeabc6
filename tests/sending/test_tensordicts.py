"""A consolidated TensorDict as one buffer and its layout."""

import copy
import pickle
import pickletools
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictParams

import tdbridge
from tdbridge import consolidate, layout_of, to_jax
from tdbridge.layout.buffer import placement_for
from tdbridge.layout.placement import placement_of
from tests import zoo
from tests.layout.check import assert_leaves_in_one_buffer, assert_same_leaves, assert_same_nodes
from tests.sending.routes import NEW, OLD, by_memory, by_protocol, by_torch, out_of_band

PACKED = [name for name in zoo.KINDS if name not in ("unbatched", "lazy_of_tensorclasses")]
"""The kinds that can be consolidated."""


def kind(name: str) -> Any:
    """A tree as it is once consolidated: parameters are a TensorDict, as in stock."""
    tree = zoo.KINDS[name]()
    return tree.to_tensordict() if name.startswith("params") else tree


@pytest.mark.parametrize("route", [*NEW, *OLD])
@pytest.mark.parametrize("name", zoo.TREES)
def test_a_tree_arrives(name, route):
    """Bit for bit, every node as it was, in one aligned buffer, consolidated and locked."""
    found = route(consolidate(zoo.TREES[name]()))
    assert_same_leaves(found, zoo.expected(name))
    assert_same_nodes(found, zoo.TREES[name](), order=False)
    assert_leaves_in_one_buffer(found)
    assert found.is_locked


@pytest.mark.parametrize("route", [by_memory, by_protocol(5), by_protocol(4)])
@pytest.mark.parametrize("name", PACKED)
def test_a_kind_arrives(name, route):
    """Lazy stacks, jagged tensors and values per element come back as what they are."""
    found = route(consolidate(zoo.KINDS[name]()))
    assert zoo.described(found) == zoo.described(kind(name))
    assert found.is_consolidated()
    assert found.is_locked


@pytest.mark.parametrize("name", [*zoo.TREES, *PACKED])
def test_there_is_one_buffer_and_little_besides(name):
    """The buffer is the memory of the tree itself; the rest is its description."""
    tree = consolidate({**zoo.TREES, **zoo.KINDS}[name]())
    data, buffers = out_of_band(tree)
    layout = layout_of(tree)
    # numpy arrays among the non-tensor values have a buffer of their own.
    *_, last = sizes = [buffer.raw().nbytes for buffer in buffers]
    assert last == layout.nbytes
    assert len(sizes) == (2 if name in ("non_tensors", "values_per_element") else 1)
    entries = len(layout.leaves) + len(layout.nodes)
    assert len(data) < 1500 + 128 * entries


def test_the_buffer_is_not_copied():
    """What goes out of band is the memory of the tree, and what comes is used as it is."""
    tree = consolidate(zoo.nested())
    data, (buffer,) = out_of_band(tree)
    assert np.frombuffer(buffer, np.uint8).ctypes.data == placement_of(tree).storage.data_ptr()  # type: ignore[union-attr]
    again = pickle.loads(data, buffers=[buffer])
    assert again["obs"].data_ptr() == tree["obs"].data_ptr()


def test_what_is_read_only_is_copied():
    """A tensor can be written to, and bytes must not change."""
    data, buffers = out_of_band(consolidate(TensorDict(x=torch.ones(16))))
    own = bytes(buffers[0])
    found = pickle.loads(data, buffers=[own])
    found["x"].zero_()
    assert own == np.ones(16, np.float32).tobytes()


def test_what_is_misaligned_is_copied_to_aligned_memory():
    """JAX can share the leaves, wherever the message lay."""
    data, buffers = out_of_band(consolidate(zoo.nested()))
    room = bytearray(1) + bytearray(buffers[0].raw())
    found = pickle.loads(data, buffers=[memoryview(room)[1:]])
    assert_leaves_in_one_buffer(found)
    assert_same_leaves(found, zoo.expected("nested"))
    to_jax(found, copy=False)


@pytest.mark.parametrize(
    "name", ["flat", "nested", "tensorclass", "tensorclass_inside", "subclass"]
)
def test_where_the_leaves_lie_is_known_again(name):
    """Packing, casting or sending it on takes no walk over the leaves."""
    found = by_memory(consolidate(zoo.TREES[name]()))
    placement = placement_of(found)
    assert placement is not None
    assert placement.whole == layout_of(zoo.TREES[name]())
    assert placement.holds
    assert (
        tdbridge.to_torch(to_jax(found, packed=True, narrow="never")).batch_size == found.batch_size
    )
    assert type(tdbridge.to_torch(to_jax(found, packed=True))) is type(zoo.TREES[name]())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", zoo.TREES)
def test_the_source_is_not_changed(name, protocol):
    """Neither what is consolidated nor what is not: no lock, no key in its metadata."""
    source, tree = zoo.TREES[name](), consolidate(zoo.TREES[name]())
    slot = (tree._tensordict if hasattr(tree, "obs") else tree)._consolidated
    before, entries = copy.deepcopy(slot["metadata"]), set(slot)
    for td in (source, tree):
        pickle.dumps(td, protocol=protocol)
    assert repr(slot["metadata"]) == repr(before)
    assert set(slot) == entries
    assert not source.is_locked
    assert not source.is_consolidated()
    assert source.keys() == zoo.TREES[name]().keys()


def test_the_source_can_still_be_moved_to_shared_memory():
    """A pickle pins nothing: `share_memory_()` afterwards is that of any tensor."""
    tree = consolidate(zoo.flat())
    out_of_band(tree)
    assert placement_of(tree).storage.untyped_storage().resizable()  # type: ignore[union-attr]


def test_an_older_protocol_needs_no_tdbridge():
    """It is stock's own format."""
    tree = consolidate(zoo.flat())
    for protocol in (2, 3, 4):
        assert b"tdbridge" not in pickle.dumps(tree, protocol=protocol)
    assert b"tdbridge.sending" in pickle.dumps(tree, protocol=5)


def test_what_is_not_consolidated_is_left_to_stock():
    """Its pickle is the one that it had without us, at each protocol."""
    td = zoo.nested()
    for protocol in (2, 3, 4, 5):
        data = pickle.dumps(td, protocol=protocol)
        assert b"tdbridge" not in data
        found = pickle.loads(data)
        assert_same_leaves(found, zoo.expected("nested"))
        assert not found.is_locked


def test_what_changed_under_the_lock_comes_along():
    """A batch size and a name, which no lock keeps; a tree that is described anew."""
    tree = consolidate(TensorDict({"x": torch.ones(2, 3), "s": "text"}, [2, 3]))
    tree.batch_size = [2]
    tree.names = ["row"]
    found = by_memory(tree)
    assert found.batch_size == torch.Size([2])
    assert found.names == ["row"]
    assert found["s"] == "text"


def test_other_kinds_are_left_to_stock():
    """Parameters and their gradients are pickled as they were."""
    params = TensorDictParams(TensorDict(w=torch.ones(3)))
    found = pickle.loads(pickle.dumps(params, protocol=5))
    assert isinstance(found, TensorDictParams)
    assert isinstance(found["w"], torch.nn.Parameter)
    td = TensorDict(w=torch.ones(3, requires_grad=True))
    assert pickle.loads(pickle.dumps(td, protocol=5))["w"].requires_grad


class Odd(TensorDict):
    """A subclass that says itself how it is pickled."""

    def __reduce__(self):
        return Odd._made, (self["x"].tolist(),)

    @staticmethod
    def _made(values):
        return Odd(x=torch.tensor(values) * 10)


def test_a_class_with_a_reduction_of_its_own_keeps_it():
    """Consolidated or not."""
    for odd in (Odd(x=torch.ones(2)), consolidate(Odd(x=torch.ones(2)))):
        for protocol in (4, 5):
            found = pickle.loads(pickle.dumps(odd, protocol=protocol))
            assert type(found) is Odd
            assert found["x"].tolist() == [10, 10]


def test_two_messages_of_one_structure_are_planned_once():
    """The plan of the second one is the object that the first one made."""
    first, second = (by_memory(consolidate(zoo.many())) for _ in range(2))
    assert placement_of(first).plan is placement_of(second).plan  # type: ignore[union-attr]


def test_a_tree_that_arrived_is_whole():
    """A write to a leaf moves with the tree, and it can be filled again."""
    found = by_memory(consolidate(zoo.nested()))
    found["obs"].zero_()
    assert not by_memory(found)["obs"].any()
    assert consolidate(zoo.nested(), out=found) is found
    assert_same_leaves(found, zoo.expected("nested"))


def test_torch_maps_a_saved_tree(tmp_path):
    """torch.save still stores one storage, which torch.load(mmap=True) maps."""
    torch.save(consolidate(zoo.flat()), tmp_path / "file")
    found = torch.load(tmp_path / "file", weights_only=True, mmap=True)
    assert_same_leaves(found, zoo.expected("flat"))
    assert placement_for(found) is not None


def test_nothing_but_known_names_is_in_a_message():
    """A message of tensors names one function of ours, the class and a view of memory."""
    data, _ = out_of_band(consolidate(zoo.nested()))
    names = [arg for op, arg, _ in pickletools.genops(data) if isinstance(arg, str)]
    modules = {name for name in names if name in ("builtins",) or name.startswith("tdbridge")}
    assert modules == {"builtins", "tdbridge.sending.tensordicts"}
    assert {op.name for op, *_ in pickletools.genops(data)}.isdisjoint({"BUILD", "NEWOBJ", "INST"})


def test_a_copy_is_what_it_was():
    """copy.copy shares the leaves, copy.deepcopy does not; neither is locked."""
    tree = consolidate(zoo.nested())
    shallow, deep = copy.copy(tree), copy.deepcopy(tree)
    assert shallow["obs"] is tree["obs"]
    assert deep["obs"].data_ptr() != tree["obs"].data_ptr()
    assert not shallow.is_locked
    assert not deep.is_locked
    assert_same_leaves(deep, zoo.expected("nested"))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_torch_saves_it_by_any_protocol(protocol, tmp_path):
    """From the fifth on the buffer is in the pickle, and no longer a storage."""
    torch.save(consolidate(zoo.nested()), tmp_path / "file", pickle_protocol=protocol)
    found = torch.load(tmp_path / "file", weights_only=False)
    assert_same_leaves(found, zoo.expected("nested"))
    assert_leaves_in_one_buffer(found)


def test_by_torch_twice():
    """A tree that torch.load gave can be saved again."""
    assert_same_leaves(by_torch(by_torch(consolidate(zoo.nested()))), zoo.expected("nested"))


@pytest.mark.parametrize("route", [by_memory, by_protocol(5)])
def test_keys_keep_their_order(route):
    """Among the tensors of a node and among its nested trees, which come behind them."""
    td = TensorDict({"b": torch.ones(1), "n": {"z": torch.ones(1), "y": torch.ones(1)}, "a": 0.5})
    found = route(consolidate(td))
    assert list(found.keys()) == ["b", "a", "n"]
    assert list(found["n"].keys()) == ["z", "y"]
