"""to_jax(td, packed=True): the segments of a consolidated tree, shared."""

import gc
import pickle
import threading
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from tensordict import NonTensorData, TensorDict, TypedTensorDict

from tdbridge import (
    AliasingError,
    ArrayDict,
    CopyError,
    LeafTypeError,
    NarrowingError,
    PackedArrayDict,
    consolidate,
    debug_aliasing,
    explain,
    to_jax,
    to_torch,
    written_since,
)
from tests import zoo
from tests.convert.trees import address, listed, pairs, x64_for
from tests.layout.check import assert_same_nodes, places
from tests.pytrees.trees import assert_same_values

DEVICES = jax.devices("cpu")
each_tree = pytest.mark.parametrize("name", zoo.TREES)


class Typed(TypedTensorDict):
    """A TypedTensorDict with two fields."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """A dataclass that JAX does not know."""

    td: Any
    other: Any


def large() -> TensorDict:
    """A tree of 64-byte leaves and more, in two segments."""
    td = TensorDict({"x": torch.arange(64.0), "i": torch.arange(64, dtype=torch.int32)}, [64])
    td["n"] = {"y": torch.ones(64, 2), "d": {"z": torch.zeros(64)}}
    return td


# -- over the zoo -----------------------------------------------------------------------------


@each_tree
def test_a_consolidated_tree_is_shared(name):
    """Its segments are the buffer: same bits, addresses, definition; nothing is committed."""
    c = consolidate(zoo.TREES[name]())
    with x64_for(name):
        p = to_jax(c, packed=True, copy=False)
        unpacked = p.unpack()
        assert jax.tree.structure(unpacked) == jax.tree.structure(to_jax(zoo.TREES[name]()))
        assert jax.tree.structure(p) == jax.tree.structure(unpacked.pack())
    assert type(p) is PackedArrayDict
    assert not any(segment.committed for segment in p.segments)
    expected = zoo.expected(name)
    for path, tensor, array in pairs(c, unpacked):
        assert zoo.same_bits(np.asarray(array), expected[path]), path
        if tensor.numel():
            assert address(array) == address(tensor) == address(p[path]), path


@each_tree
def test_any_other_tree_is_copied_once(name):
    """It is consolidated, padding zero, and is itself neither locked nor changed nor shared."""
    td = zoo.TREES[name]()
    with x64_for(name):
        p = to_jax(td, packed=True)
    assert not td.is_locked
    expected = zoo.expected(name)
    for path, tensor, array in pairs(td, p):
        assert zoo.same_bits(np.asarray(array), expected[path]), path
        if tensor.numel() and not tensor.is_neg() and not tensor.is_conj():
            assert address(array) != address(tensor), path
    _, nbytes = places(expected)
    used = sum(np.count_nonzero(np.frombuffer(a.tobytes(), np.uint8)) for a in expected.values())
    raw = b"".join(np.asarray(segment).tobytes() for segment in p.segments)
    assert (len(raw), np.count_nonzero(np.frombuffer(raw, np.uint8))) == (nbytes, used)


@each_tree
def test_to_torch_gives_the_tree_back(name):
    """Same values, classes, batch sizes, names and constants; on the CPU the memory is shared."""
    with x64_for(name):
        p = to_jax(consolidate(zoo.TREES[name]()), packed=True)
        td = to_torch(p)
        rows = explain(p, to="torch").rows
    assert_same_nodes_but_devices(td, zoo.TREES[name]())
    expected = zoo.expected(name)
    for path, tensor, array in pairs(td, p):
        assert zoo.same_bits(zoo.as_numpy(tensor), expected[path]), path
        if tensor.numel():
            assert address(tensor) == address(array), path
    assert {row.path: row.fate for row in rows} == dict.fromkeys(expected, "shared")
    assert explain(p, to="jax").rows == ()


def assert_same_nodes_but_devices(found: Any, source: Any) -> None:
    """An ArrayDict knows no device of a node."""
    if source.device is None:
        assert_same_nodes(found, source, order=False)


@pytest.mark.parametrize("name", ["nested", "tensorclass_inside", "non_tensors", "empty_inside"])
def test_a_pickle_of_a_consolidated_tree_is_shared(name):
    """What was unpickled lies in one buffer too, as long as none of its entries is replaced."""
    u = pickle.loads(pickle.dumps(consolidate(zoo.TREES[name]())))
    with x64_for(name):
        p = to_jax(u, packed=True, copy=False)
    for path, tensor, array in pairs(u, p):
        assert zoo.same_bits(np.asarray(array), zoo.expected(name)[path])
        if tensor.numel():
            assert address(array) == address(tensor), path


# -- what can change under a placement -------------------------------------------------------


def in_place(c: Any) -> None:
    c["x"].fill_(9.0)
    c["n"].zero_()


def names(c: Any) -> None:
    c["n"].names = ["t"]


def names_deep(c: Any) -> None:
    c["n", "d"].names = ["t"]


def root_batch(c: Any) -> None:
    c.batch_size = []


def nested_batch(c: Any) -> None:
    c["n"].batch_size = []


def unlock(c: Any) -> None:
    c.unlock_()
    c["x"] = torch.full((64,), 9.0)
    c.lock_()


def unlock_new_key(c: Any) -> None:
    c.unlock_()
    c["n", "new"] = torch.full((64,), 9.0)
    del c["i"]


def shared_memory(c: Any) -> None:
    c.share_memory_()
    c["x"].fill_(4.0)


def memmapped(c: Any) -> None:
    c.memmap_()
    c["x"].fill_(4.0)


@pytest.mark.parametrize(
    "change",
    [
        in_place, names, names_deep, root_batch, nested_batch, unlock, unlock_new_key,
        shared_memory, memmapped,
    ],
)  # fmt: skip
def test_a_changed_tree_is_packed_as_it_is(change):
    """Whatever is done to a consolidated tree, packing gives what converting its leaves gives."""
    c = consolidate(large())
    unpickled = pickle.loads(pickle.dumps(c))
    for tree in (c, unpickled, consolidate(pickle.loads(pickle.dumps(c)))):
        assert len(jax.tree.leaves(to_jax(tree, packed=True))) == 2
        change(tree)
        p, ad = to_jax(tree, packed=True), to_jax(tree)
        assert jax.tree.structure(p.unpack()) == jax.tree.structure(ad)
        assert_same_values(p.unpack(), ad)


def constant_tree() -> TensorDict:
    td = TensorDict({"x": torch.arange(4.0), "n": {"y": torch.ones(4)}}, [4])
    td.set_non_tensor("s", "before")
    td["n"].set_non_tensor("t", "before")
    td["list"] = NonTensorData([1], batch_size=[4])
    return td


@pytest.mark.parametrize("at", [("s",), ("n", "t")])
def test_a_constant_that_was_written_to_is_seen(at):
    """tensordict changes a non-tensor value of a locked tree in place."""
    c = consolidate(constant_tree())
    assert to_jax(c, packed=True)[at] == "before"
    c.get(at).update_(NonTensorData("after", batch_size=[4]))
    p = to_jax(c, packed=True)
    assert p[at] == "after" == to_jax(c)[at]
    assert_same_values(p.unpack(), to_jax(c))


def test_a_list_belongs_to_its_own_tree():
    """Trees with equal values share a cached layout; one of them may be written to later."""
    first, second = consolidate(constant_tree()), consolidate(constant_tree())
    assert to_jax(first, packed=True)["list"] == [1]
    first["list"].append(2)
    assert to_jax(second, packed=True)["list"] == [1]
    assert to_jax(first, packed=True)["list"] == [1, 2]


def test_a_part_of_a_consolidated_tree():
    """It is no whole buffer: packed alone it is copied, and holds the part."""
    for c in (consolidate(large()), consolidate(pickle.loads(pickle.dumps(consolidate(large()))))):
        to_jax(c, packed=True)
        p = to_jax(c["n"], packed=True)
        assert list(p.keys(True, True)) == [("d", "z"), "y"]
        assert_same_values(p.unpack(), to_jax(c["n"]))
        with pytest.raises(CopyError, match="not consolidated"):
            to_jax(c["n"], packed=True, copy=False)


def test_what_is_made_from_a_consolidated_tree():
    """Clones, slices and selections know nothing of its placement."""
    c = consolidate(large())
    to_jax(c, packed=True)
    for made in (c.clone(), c.clone(False), c[:7].lock_(), c.select("x").lock_(), c.to("cpu")):
        made["x"].mul_(1)
        assert_same_values(to_jax(made, packed=True).unpack(), to_jax(made))
    clone = c.clone(False)
    clone["x"] = torch.full((64,), 5.0)
    assert to_jax(clone, packed=True)["x"][3] == 5.0
    assert to_jax(c, packed=True)["x"][3] == 3.0


@pytest.mark.parametrize("root", ["tensorclass", "subclass", "typed"])
def test_roots_of_other_classes(root):
    """They are shared like a TensorDict, and come back as what they were."""
    if root == "typed":
        td: Any = Typed(a=torch.arange(3.0), b=torch.arange(3, dtype=torch.int8), batch_size=[3])
    else:
        td = zoo.TREES[root]()
    c = consolidate(td)
    p = to_jax(c, packed=True, copy=False)
    assert p.tensorclass is type(td)
    assert type(to_torch(p)) is type(td)
    assert_same_values(p.unpack(), to_jax(td))


def test_a_file(tmp_path):
    """A tree in a file, and one read from it, are shared: a write in torch reaches the array."""
    c = consolidate(large(), filename=tmp_path / "f")
    p = to_jax(c, packed=True, copy=False)
    loaded = TensorDict.from_consolidated(tmp_path / "f")
    again = to_jax(loaded, packed=True, copy=False)
    c["x"][0] = 7.0
    assert float(p["x"][0]) == float(again["x"][0]) == float(loaded["x"][0]) == 7.0


def test_a_refilled_buffer_is_packed_without_looking_at_its_leaves():
    """After `consolidate(td, out=c)` the array of the same memory has the new values."""
    c = consolidate(large())
    before = to_jax(c, packed=True, copy=False)
    consolidate(large() * 2, out=c)
    after = to_jax(c, packed=True, copy=False)
    assert address(after.segments[0]) == address(before.segments[0])
    assert after["x"].tolist() == (np.arange(64.0) * 2).tolist()


def test_threads():
    """Trees of one structure, filled and packed at once, do not get into each other's way."""

    def source(k: int) -> TensorDict:
        return TensorDict({f"a{i}": torch.full((3,), float(k + i)) for i in range(8)}, [3])

    wrong = []

    def work(k: int) -> None:
        c = consolidate(source(k))
        for j in range(30):
            consolidate(source(k + j), out=c)
            found = to_jax(c, packed=True, copy=True)
            wrong.extend(i for i in range(8) if float(found[f"a{i}"][0]) != k + j + i)

    threads = [threading.Thread(target=work, args=(100 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- arguments --------------------------------------------------------------------------------


def test_copy():
    """True copies a consolidated tree; False refuses one that is not, and an ArrayDict."""
    c = consolidate(large())
    p = to_jax(c, packed=True, copy=True)
    assert address(p["x"]) != address(c["x"])
    c["x"].fill_(5.0)
    assert p["x"][3] == 3.0
    with pytest.raises(CopyError, match=r"pack tdbridge\.consolidate\(td\)"):
        to_jax(large(), packed=True, copy=False)
    with pytest.raises(CopyError, match="packing an ArrayDict copies"):
        to_jax(to_jax(large()), packed=True, copy=False)
    with pytest.raises(CopyError) as error:
        to_jax({"a": large(), "b": [c, to_jax(large())]}, packed=True, copy=False)
    assert list(listed(error.value)) == ["['a']", "['b', '1']"]
    assert to_jax(p, packed=True, copy=False) is not None


def test_narrowed_segments():
    """A segment whose values all fit is narrowed once; its leaves are read in the new dtype."""
    td = TensorDict({"a": torch.arange(3), "n": {"b": torch.tensor(-(2**31))}, "x": torch.ones(2)})
    for tree in (td, consolidate(td)):
        p = to_jax(tree, packed=True)
        assert [str(s.dtype) for s in p.segments] == ["float32", "int32"]
        assert p["a"].tolist() == [0, 1, 2]
        assert p["n", "b"].dtype == jnp.int32
        assert int(p["n", "b"]) == -(2**31)
        assert "a: int32[3]" in repr(p)
        back = to_torch(p, like=td)
        assert back["a"].dtype == torch.int64
    with pytest.raises(CopyError, match="x64"):
        to_jax(consolidate(td), packed=True, copy=False)
    with jax.enable_x64(True):
        p = to_jax(consolidate(td), packed=True, copy=False)
    assert p["a"].dtype == jnp.int64


@pytest.mark.parametrize("wrap", [lambda td: td, lambda td: {"td": td}], ids=["alone", "inside"])
def test_narrowing_that_would_lose_values_names_the_leaf(wrap):
    """Not the segment, whose other leaves are innocent."""
    td = consolidate(TensorDict({"ok": torch.arange(3), "n": {"big": torch.tensor([2**40])}}))
    where = "['td', 'n', 'big']" if isinstance(wrap(td), dict) else "['n', 'big']"
    with pytest.raises(NarrowingError) as error:
        to_jax(wrap(td), packed=True)
    assert list(listed(error.value)) == [where]
    with pytest.raises(NarrowingError, match="float64, which would be rounded"):
        to_jax(TensorDict({"d": torch.ones(2, dtype=torch.float64)}), packed=True)
    d = TensorDict({"d": torch.tensor([0.1], dtype=torch.float64)})
    assert to_jax(d, packed=True, narrow="allow")["d"].tolist() == [np.float32(0.1)]
    with pytest.raises(NarrowingError, match='narrow="never"'):
        to_jax(TensorDict({"i": torch.arange(2)}), packed=True, narrow="never")


def test_a_device():
    """Segments go there, and are committed; so do those of an ArrayDict and of a packed tree."""
    there = DEVICES[2]
    for tree in (large(), consolidate(large()), to_jax(large()), to_jax(large(), packed=True)):
        p = to_jax(tree, packed=True, device=there)
        assert type(p) is PackedArrayDict
        assert {(s.device, s.committed) for s in p.segments} == {(there, True)}
        assert_same_values(p.unpack(), to_jax(large()))
        assert p["x"].device == there
    assert to_jax(large(), packed=True, device="cpu").segments[0].committed


def test_a_sharding():
    """One for all segments, or a tree of them in which one stands above each packed tree."""
    split = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    p = to_jax(large(), packed=True, sharding=split)
    assert {s.sharding for s in p.segments} == {split}
    assert_same_values(p.unpack(), to_jax(large()))
    tree = {"td": consolidate(large()), "step": torch.tensor(3.0)}
    found = to_jax(tree, packed=True, sharding={"td": split, "step": None})
    assert {s.sharding for s in found["td"].segments} == {split}
    assert not found["step"].committed


def test_a_pytree_with_tensordicts_in_it():
    """Each TensorDict is packed; the rest is converted as ever, tied leaves once."""
    weight, c = torch.ones(16), consolidate(large())
    tree = [{"td": c, "w": weight}, (large(), weight, None, "text", np.arange(3, dtype=np.int8))]
    found: Any = to_jax(tree, packed=True)
    assert type(found[0]["td"]) is type(found[1][0]) is PackedArrayDict
    assert address(found[0]["td"]["x"]) == address(c["x"])
    assert found[0]["w"] is found[1][1]
    assert address(found[0]["w"]) == address(weight)
    assert found[1][2:4] == (None, "text")
    assert found[1][4].tolist() == [0, 1, 2]
    assert isinstance(to_jax(weight, packed=True), jax.Array)


def test_a_tensordict_in_a_dataclass_is_packed():
    """Fields of a dataclass that JAX takes for a leaf are packed as those of any container."""
    batch = Batch(TensorDict({"x": torch.ones(3)}), torch.zeros(2))
    got = to_jax([batch], packed=True)[0]
    assert isinstance(got.td, PackedArrayDict)
    assert got.td["x"].tolist() == [1, 1, 1]
    assert got.other.tolist() == [0, 0]
    assert isinstance(batch.td, TensorDict)


def test_an_arraydict_is_packed():
    """Its numpy leaves are narrowed by the rules of to_jax."""
    ad = ArrayDict({"x": jnp.ones(3), "i": np.arange(3)})
    p = to_jax(ad, packed=True)
    assert type(p) is PackedArrayDict
    assert p["i"].dtype == jnp.int32
    with pytest.raises(NarrowingError, match=r"\['i'\]"):
        to_jax(ArrayDict({"x": jnp.ones(3), "i": np.array([2**40])}), packed=True)


def test_a_packed_tree_stays_what_it_is():
    """Also where numpy holds its segments: they become arrays."""
    p = to_jax(large(), packed=True)
    assert to_jax(p, packed=True).segments[0] is p.segments[0]
    assert to_jax(p).segments[0] is p.segments[0]
    host = to_jax(jax.device_get(p))
    assert isinstance(host.segments[0], jax.Array)
    assert_same_values(host.unpack(), p.unpack())


def test_leaves_that_cannot_be_carried_are_all_named():
    """By one error with their paths in the whole tree."""
    sparse = torch.ones(2).to_sparse()
    tree = {"a": TensorDict({"x": sparse, "y": torch.ones(2)}, []), "b": [sparse], "c": sparse}
    with pytest.raises(LeafTypeError) as error:
        to_jax(tree, packed=True)
    assert list(listed(error.value)) == ["['a', 'x']", "['b', '0']", "['c']"]


def test_a_deleted_tree_is_named():
    """to_torch and explain say where a packed tree stood whose segments are gone."""
    tree = ArrayDict({"x": jnp.ones(3)}).pack()
    tree.segments[0].delete()
    for convert in (to_torch, lambda tree: explain(tree, to="torch")):
        with pytest.raises(LeafTypeError, match=r"\['t', '0'\]: got a Packed.* deleted or donated"):
            convert({"t": [tree]})


def test_while_jax_traces():
    """Inside of jit the segments become constants."""
    c = consolidate(large())
    found = jax.jit(lambda x: x + to_jax(c, packed=True, copy=False)["x"])(jnp.ones(64))
    assert found.tolist() == (np.arange(64.0) + 1).tolist()


def test_no_transfer_guard_stops_it():
    """A conversion is no implicit transfer, and neither is reading a leaf."""
    c = consolidate(large())
    with jax.transfer_guard("disallow"):
        p = to_jax(c, packed=True)
        assert p.unpack()["x"].shape == p["x"].shape == (64,)
        assert p.unpack().pack()["x"].shape == (64,)


# -- lifetimes and aliasing -------------------------------------------------------------------


def test_the_tensordict_may_go_first():
    """The segments keep the buffer, and a leaf keeps it when they are gone too."""
    p = to_jax(consolidate(large()), packed=True)
    leaf = p["x"]
    gc.collect(1)
    del p
    gc.collect(1)
    blocks = [torch.full((256,), -1.0) for _ in range(200)]
    assert leaf.tolist() == np.arange(64.0).tolist()
    assert len(blocks) == 200


def test_nothing_is_kept():
    """The placement is kept by its tree alone: without both, the buffer is freed."""
    c = consolidate(large())
    p = to_jax(c, packed=True)
    to_jax(c, packed=True, copy=True)
    storage = torch.multiprocessing.reductions.StorageWeakRef(c["x"].untyped_storage())
    del c, p
    gc.collect()
    assert storage.expired()


def test_donation_leaves_the_tensors_alone():
    """XLA does not write to memory that torch owns, whatever is donated."""
    c = consolidate(large())
    p = to_jax(c, packed=True, copy=False)
    leaves = p.unpack()
    zero = jax.jit(lambda tree: jax.tree.map(lambda s: s * 0, tree), donate_argnums=0)
    assert float(jax.block_until_ready(zero(p))["x"].sum()) == 0.0
    assert c["x"].tolist() == leaves["x"].tolist() == np.arange(64.0).tolist()


def test_a_tensor_of_a_packed_tree_outlives_it():
    """The memory that to_torch shares is kept, donated or not."""
    p = jax.tree.map(lambda s: s + 1, to_jax(large().exclude("i"), packed=True))
    td = to_torch(p)
    expected = td["x"].clone()
    zero = jax.jit(lambda tree: jax.tree.map(lambda s: s * 0, tree), donate_argnums=0)
    jax.block_until_ready(zero(p))
    del p
    gc.collect(1)
    blocks = [jnp.full(400, -1.0) for _ in range(50)]
    assert torch.equal(td["x"], expected)
    assert len(blocks) == 50


def test_writes_are_found_by_segment():
    """debug_aliasing records what was shared: the segments, under the names of their dtypes."""
    c = consolidate(large())
    with debug_aliasing():
        p = to_jax({"td": c}, packed=True)
        assert written_since(p) == {}
        c["x"][0] = 5.0
        with pytest.raises(AliasingError, match=r"\['float32'\]: it was written in place"):
            to_jax(c, packed=True)
    assert written_since(p) == {("td", "float32"): "it was written in place"}
    assert written_since(p["td"]) == {("float32",): "it was written in place"}


def test_a_copy_is_not_recorded():
    """Nothing is shared by it, so that it may be written to."""
    c = consolidate(large())
    with debug_aliasing():
        p = to_jax(c, packed=True, copy=True)
        moved = to_jax(c, packed=True, device=DEVICES[1])
        c["x"][0] = 5.0
        to_jax(c, packed=True, copy=True)
    for tree in (p, moved):
        with pytest.raises(AliasingError, match="no leaf of this tree was recorded"):
            written_since(tree)
