"""consolidate: the same tree, in one aligned buffer of its own."""

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorClass, TensorDict, is_tensorclass
from torch._subclasses.fake_tensor import FakeTensorMode

import tdbridge
from tdbridge import consolidate, layout_of
from tdbridge.errors import LeafTypeError
from tests import zoo
from tests.layout.check import (
    assert_aligned,
    assert_leaves_in_one_buffer,
    assert_same_leaves,
    assert_same_nodes,
    buffer_of,
    places,
)


@pytest.mark.parametrize("name", zoo.TREES)
def test_the_result_is_a_consolidated_tree(name):
    """A real tree of the same class, locked, in one buffer at the right places, returned as it is
    when it is consolidated again."""
    source = zoo.TREES[name]()
    c = consolidate(source)
    assert type(c) is type(source)
    assert isinstance(c, TensorDict) or is_tensorclass(type(c))
    assert all(node.is_locked for node in zoo.nodes(c).values())
    assert_leaves_in_one_buffer(c)
    assert consolidate(c) is c
    assert consolidate(c, device="cpu") is c


@pytest.mark.parametrize("name", zoo.TREES)
def test_the_tree_is_kept(name):
    """Values bit for bit, classes, keys in their order, batch sizes, names, devices, entries."""
    c = consolidate(zoo.TREES[name]())
    assert_same_leaves(c, zoo.expected(name))
    assert_same_nodes(c, zoo.TREES[name]())


bits = st.sampled_from(zoo.BOTH).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        st.integers(0, 2**32 - 1),
    )
)
names = st.lists(st.text(max_size=3), min_size=1, max_size=3).map(tuple)


@given(st.dictionaries(names, bits, max_size=8))
def test_any_bits_survive(rows):
    """Every pattern of bits, NaNs with payloads among them, in any tree of any dtypes."""
    arrays, td = {}, TensorDict()
    for path, (name, shape, seed) in rows.items():
        if any(path[:i] in arrays for i in range(1, len(path))) or path in td.keys(True):
            continue
        dtype = zoo.numpy_dtype(name)
        size = int(np.prod(shape)) * dtype.itemsize
        raw = np.random.default_rng(seed).integers(0, 2 if name == "bool" else 256, size, "uint8")
        arrays[path] = raw.view(dtype).reshape(shape)
        flat = torch.from_numpy(raw).view(getattr(torch, name)) if size else torch.empty(0)
        td[path] = flat.to(getattr(torch, name)).reshape(shape)
    c = consolidate(td)
    assert_same_leaves(c, arrays)
    starts, size = places(arrays)
    assert layout_of(c).nbytes == size
    if arrays:
        expected = np.zeros(size, "uint8")
        for path, array in arrays.items():
            raw = np.frombuffer(array.tobytes(), "uint8")
            expected[starts[path] : starts[path] + len(raw)] = raw
        assert buffer_of(c).tobytes() == expected.tobytes()


@pytest.fixture
def dirty_memory() -> Iterator[None]:
    """torch fills fresh integer memory with its largest value instead of leaving it to chance."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(64, dtype=torch.uint8).eq(255).all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("dirty_memory")
@pytest.mark.parametrize("name", [name for name in zoo.TREES if zoo.expected(name)])
def test_padding_is_zero(name):
    """Every byte between and after the leaves is zero, whatever the memory held before."""
    arrays = zoo.expected(name)
    starts, size = places(arrays)
    expected = np.zeros(size, "uint8")
    for path, array in arrays.items():
        raw = np.frombuffer(array.tobytes(), "uint8")
        expected[starts[path] : starts[path] + len(raw)] = raw
    assert buffer_of(consolidate(zoo.TREES[name]())).tobytes() == expected.tobytes()


def test_a_large_buffer_is_like_any_other():
    """More than 32 MB come from another allocator."""
    sizes = {"a": 2**23 + 1, "b": 3}
    arrays = {(key,): np.arange(size, dtype=np.float32) for key, size in sizes.items()}
    td = TensorDict({key: torch.from_numpy(array) for (key,), array in arrays.items()})
    c = consolidate(td)
    assert_leaves_in_one_buffer(c)
    starts, size = places(arrays)
    assert len(buffer_of(c)) == size
    assert not buffer_of(c)[2**25 + 4 : starts["b",]].any()
    tdbridge.to_jax(c, copy=False)
    assert_same_leaves(pickle.loads(pickle.dumps(c)), arrays)
    assert_same_leaves(c.share_memory_(), arrays)


@pytest.mark.parametrize("name", zoo.TREES)
def test_the_source_is_left_alone(name):
    """Its leaves are the same objects afterwards, it is not locked, and no memory is shared."""
    source = zoo.TREES[name]()
    before = zoo.leaves(source)
    c = consolidate(source)
    after = zoo.leaves(source)
    assert list(after) == list(before)
    assert all(after[path] is before[path] for path in before)
    assert not any(node.is_locked for node in zoo.nodes(source).values())
    assert not source.is_consolidated()
    assert_same_nodes(source, zoo.TREES[name]())
    for leaf in zoo.leaves(c).values():
        if leaf.numel():
            leaf.reshape(-1).view(torch.uint8).zero_()
    assert_same_leaves(source, zoo.expected(name))


def test_a_stock_buffer_is_not_taken_for_ours():
    """Leaves that stock put elsewhere, unaligned, are copied; the source stays as it is."""
    stock = zoo.nested().consolidate(metadata=True)
    pointers = {path: leaf.data_ptr() for path, leaf in zoo.leaves(stock).items()}
    assert any(pointer % 64 for pointer in pointers.values())
    c = consolidate(stock)
    assert c is not stock
    assert_leaves_in_one_buffer(c)
    assert {path: leaf.data_ptr() for path, leaf in zoo.leaves(stock).items()} == pointers


def test_what_is_returned_as_it_is_is_locked(tmp_path):
    """An unlocked tree from a stock file whose only leaf lies right gives a locked tree."""
    td = TensorDict({"x": torch.arange(16.0)}, [16])
    td.consolidate(filename=str(tmp_path / "file"))
    loaded = TensorDict.from_consolidated(tmp_path / "file")
    assert not loaded.is_locked
    assert consolidate(loaded).is_locked


def test_a_part_of_a_buffer_is_not_a_buffer():
    """A nested tensordict of an unpickled tree gets a buffer of its own, of its own size."""
    td = TensorDict({"n": {"a": torch.ones(3)}, "z": torch.arange(3)})
    whole = pickle.loads(pickle.dumps(consolidate(td)))
    assert whole["n"].is_consolidated()
    part = consolidate(whole["n"])
    assert buffer_of(part).nbytes == layout_of(part).nbytes == 64


def test_an_edited_tree_is_consolidated_anew():
    """After it was unlocked and an entry was set, the leaves are copied to another buffer."""
    c = consolidate(zoo.non_tensors())
    c.unlock_()
    c["x"] = torch.full((2,), 9.0)
    again = consolidate(c)
    assert again is not c
    assert again["x"].tolist() == [9, 9]
    assert_leaves_in_one_buffer(again)


def test_gradients_are_not_carried():
    """The result is detached; the source keeps its graph."""
    x = torch.ones(3, requires_grad=True)
    td = TensorDict({"x": x * 2, "p": torch.nn.Parameter(torch.ones(2))})
    c = consolidate(td)
    assert not c["x"].requires_grad
    assert type(c["p"]) is torch.Tensor
    td["x"].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


def test_one_tensor_under_two_keys_becomes_two():
    """Each leaf has a place of its own, also where the source shared memory between leaves."""
    x = torch.arange(4.0)
    c = consolidate(TensorDict({"a": x, "b": x, "view": x[1:3]}))
    c["a"].zero_()
    assert c["b"].tolist() == [0, 1, 2, 3]
    assert c["view"].tolist() == [1, 2]


def test_expanded_batches_are_written_out():
    """A leaf that expand() repeats is stored once per element."""
    c = consolidate(zoo.flat().expand(3, 4))
    assert c.batch_size == (3, 4)
    assert_aligned(c)
    assert c["a"].tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("wide", ["complex128", "float64"])
def test_a_wide_leaf_may_follow_a_small_one(wide):
    """A 16-byte dtype is aligned whatever lies before it (stock raises for complex128)."""
    td = TensorDict({"a": torch.ones((), dtype=torch.int64), "b": zoo.pattern(wide, 3)})
    assert_same_leaves(consolidate(td), {p: zoo.as_numpy(t) for p, t in zoo.leaves(td).items()})


class Halved(TensorClass, skip_post_init_on_rebuild=True):
    """A tensorclass that changes its data once, when it comes in."""

    obs: torch.Tensor

    def __post_init__(self) -> None:
        self.obs = self.obs / 2


class AlwaysHalved(TensorClass):
    """A tensorclass with a `__post_init__` that stock runs on every rebuild."""

    obs: torch.Tensor

    def __post_init__(self) -> None:
        self.obs = self.obs / 2


@pytest.mark.parametrize("cls", [Halved, AlwaysHalved])
def test_post_init_is_not_run_again(cls):
    """The values of a tensorclass are those it has, and they lie in the buffer."""
    source = cls(obs=torch.ones(2), batch_size=[2])
    for tree in (consolidate(source), consolidate(TensorDict({"c": source}, [2]))["c"]):
        assert source.obs.tolist() == [0.5, 0.5]
        assert tree.obs.tolist() == [0.5, 0.5]
        assert tree.obs.untyped_storage().nbytes() == 64


def test_a_field_that_holds_a_plain_tensordict_keeps_it():
    """A field annotated with a tensorclass is not converted to it on the way."""
    inner = TensorDict({"obs": torch.ones(2, 3)}, [2])
    inner.set_non_tensor("label", "plain")
    source: Any = zoo.Step(obs=torch.zeros(2), label="x", batch_size=[2])
    source._tensordict["after"] = inner
    assert_same_nodes(consolidate(source), source)


def test_a_non_tensor_entry_keeps_its_batch_size_and_device():
    """What stock keeps of an entry without tensors is kept here too."""
    td = TensorDict({"x": torch.zeros(2, 3)}, [2], device="cpu")
    td["s"] = "text"
    entry, stock = consolidate(td).get("s"), td.consolidate(metadata=True).get("s")
    assert isinstance(entry, NonTensorData)
    assert entry.batch_size == stock.batch_size == td.get("s").batch_size == (2,)
    assert entry.device == stock.device == td.get("s").device == torch.device("cpu")


def test_the_buffer_can_live_on_the_meta_device():
    """With a device the buffer is made there; shapes and dtypes are kept."""
    c = consolidate(zoo.with_device(), device="meta")
    assert c.device == torch.device("meta")
    assert {p: (t.dtype, t.shape, t.device.type) for p, t in zoo.leaves(c).items()} == {
        ("x",): (torch.float32, (2,), "meta"),
        ("n", "y"): (torch.int8, (2,), "meta"),
    }


def test_a_default_device_does_not_count():
    """Under another default device, and after it, a tree on the CPU is consolidated on the CPU."""

    def tree() -> TensorDict:
        return TensorDict({"x": torch.ones(37, device="cpu")})

    with torch.device("meta"):
        inside = consolidate(tree())
    assert inside["x"].tolist() == [1] * 37
    assert consolidate(tree())["x"].tolist() == [1] * 37


def test_a_fake_tensor_mode_leaves_nothing_behind():
    """What is traced or fails under fake tensors does not stop the same tree afterwards."""
    source = TensorDict({"x": torch.ones(41)})
    with FakeTensorMode(), contextlib.suppress(AssertionError, LeafTypeError):
        consolidate(source)
    assert consolidate(source)["x"].tolist() == [1] * 41


def test_a_memory_mapped_tree_is_copied_to_memory(tmp_path):
    """The result of a memory-mapped source is plain memory; its files are not written to."""
    source = zoo.nested().memmap(tmp_path)
    c = consolidate(source)
    assert_leaves_in_one_buffer(c)
    assert_same_leaves(c, zoo.expected("nested"))
    assert not c.is_memmap()
    assert all(type(leaf) is torch.Tensor for leaf in zoo.leaves(c).values())
    c["obs"].zero_()
    assert_same_leaves(source, zoo.expected("nested"))


def test_the_package_exports_it():
    """`tdbridge.consolidate` is this function."""
    assert tdbridge.consolidate is consolidate
