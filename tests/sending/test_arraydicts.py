"""An ArrayDict, plain and packed, as one buffer and its layout."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tdbridge
from tdbridge import ArrayDict, PackedArrayDict, consolidate, layout_of, to_jax
from tests import zoo
from tests.pytrees.trees import arrays, assert_same_values
from tests.sending.routes import NEW, OLD, aligned, by_memory, by_protocol, out_of_band

ROUTES = [*NEW, *OLD]


def packable(name: str) -> PackedArrayDict:
    with jax.enable_x64(True):
        return to_jax(consolidate(zoo.TREES[name]()), packed=True)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", zoo.TREES)
def test_a_tree_arrives(name, route):
    """With its definition and every bit, 64-bit leaves too, although x64 is off."""
    ad = arrays(name)
    found = route(ad)
    assert type(found) is ArrayDict
    assert jax.tree.structure(found) == jax.tree.structure(ad)
    assert_same_values(found, ad)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", zoo.TREES)
def test_a_packed_tree_arrives_packed(name, route):
    """One array for each dtype, and the same tree in them."""
    packed = packable(name)
    found = route(packed)
    assert type(found) is PackedArrayDict
    assert jax.tree.structure(found) == jax.tree.structure(packed)
    assert_same_values(found.unpack(), packed.unpack())
    assert_same_values(found.segments, packed.segments)


@pytest.mark.parametrize("route", [by_memory, by_protocol(4)])
@pytest.mark.parametrize("name", [name for name in zoo.KINDS if name != "unbatched"])
def test_a_kind_arrives(name, route):
    """What is more than a dict of arrays of one batch, too."""
    with jax.enable_x64(True):
        ad = to_jax(zoo.KINDS[name]())
    found = route(ad)
    assert jax.tree.structure(found) == jax.tree.structure(ad)
    assert_same_values(found, ad)


@pytest.mark.parametrize("tree", [arrays, packable])
@pytest.mark.parametrize("name", zoo.TREES)
def test_there_is_one_buffer_and_little_besides(name, tree):
    """Laid out as the TensorDict is that it stands for, its padding zero."""
    data, buffers = out_of_band(tree(name))
    layout = layout_of(zoo.TREES[name]())
    whole = consolidate(zoo.TREES[name]())
    (_, (expected, *_)) = out_of_band(whole) if name != "non_tensors" else (0, [None])
    if expected is not None:
        assert [bytes(buffer) for buffer in buffers] == [bytes(expected)]
    assert buffers[-1].raw().nbytes == layout.nbytes
    assert len(data) < 1500 + 128 * (len(layout.leaves) + len(layout.nodes))


@pytest.mark.parametrize("tree", [arrays, packable])
def test_what_arrives_shares_the_buffer(tree):
    """Where it is aligned, read-only too: no array is copied."""
    data, (buffer,) = out_of_band(tree("narrow_dtypes"))
    memory = aligned(buffer)
    memory.flags.writeable = False
    found = pickle.loads(data, buffers=[memory])
    inside = range(memory.ctypes.data, memory.ctypes.data + memory.nbytes)
    assert all(a.unsafe_buffer_pointer() in inside for a in jax.tree.leaves(found))


@pytest.mark.parametrize("route", ROUTES)
def test_numpy_arrays_stay_numpy_arrays(route):
    """Beside those of JAX; they can be written to."""
    ad = ArrayDict({"n": np.arange(3), "j": jnp.ones(3), "deep": {"n": np.ones((3, 2), "f2")}}, [3])
    found = route(ad)
    assert type(found["n"]) is type(found["deep", "n"]) is np.ndarray
    assert isinstance(found["j"], jax.Array)
    assert_same_values(found, ad)
    found["n"][0] = 7
    assert ad["n"][0] == 0


@pytest.mark.parametrize("route", ROUTES)
def test_a_weak_type_stays_weak(route):
    """Python numbers promote as such after the journey, too."""
    ad = ArrayDict({"lr": 0.5, "step": 3, "x": jnp.ones(2, jnp.bfloat16)})
    found = route(ad)
    assert [found[key].weak_type for key in ("lr", "step", "x")] == [True, True, False]
    assert (found["lr"] * found["x"]).dtype == jnp.bfloat16
    assert_same_values(found, ad)


def test_arrays_are_uncommitted():
    """They go where other arguments are."""
    found = by_memory(arrays("flat"))
    other = jax.device_put(jnp.ones((4, 3)), jax.devices()[1])
    assert (found["b"] + other).devices() == other.devices()


def as_before(tree: Any) -> bool:
    """Whether a tree is pickled array by array."""
    return b"rebuild_" not in pickle.dumps(tree, protocol=5)


def test_an_array_over_several_devices_is_pickled_by_itself():
    """It comes back whole, on one device, as JAX's own pickles do."""
    mesh = jax.make_mesh((8,), ("x",))
    split = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))
    ad = ArrayDict({"x": split, "y": jnp.ones(3)})
    assert as_before(ad)
    assert_same_values(by_memory(ad), ad)


def test_keys_are_pickled_by_themselves():
    """Typed PRNG keys come back as keys."""
    ad = ArrayDict({"key": jax.random.key(3), "x": jnp.ones(2)})
    found = by_memory(ad)
    assert jnp.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(ad["key"]))


@pytest.mark.parametrize(
    "leaf", [None, True, jax.ShapeDtypeStruct((2,), "float32"), PartitionSpec()]
)
def test_a_tree_of_other_leaves_is_pickled_as_before(leaf):
    """Masks, shapes and specs have no place in a buffer."""
    ad = jax.tree.map(lambda _: leaf, arrays("nested"))
    found = by_memory(ad)
    assert found.to_dict() == ad.to_dict()


def test_a_tree_of_other_ranks_is_pickled_as_before():
    """Its definition does not follow from the shapes of its leaves, and it comes back equal."""
    ad = jax.tree.map(lambda leaf: leaf.sum(), arrays("deeper_batch"))
    assert as_before(ad)
    assert jax.tree.structure(by_memory(ad)) == jax.tree.structure(ad)
    assert not as_before(arrays("deeper_batch"))


def test_dtypes_that_torch_lacks_arrive():
    """JAX's own small ones."""
    ad = ArrayDict({"a": jnp.arange(4, dtype="int4"), "b": jnp.ones(3, "float8_e3m4")})
    assert not as_before(ad)
    assert_same_values(by_memory(ad), ad)


def test_arrays_that_are_not_row_major_arrive():
    """A layout of their own is not carried, the values are."""
    from jax.experimental.layout import Format, Layout

    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    turned = jax.device_put(jnp.arange(12.0).reshape(3, 4), Format(Layout((1, 0)), single))
    ad = ArrayDict({"x": turned, "n": np.asfortranarray(np.arange(6).reshape(2, 3))})
    assert_same_values(by_memory(ad), ad)


def test_a_foreign_byte_order_is_pickled_as_before():
    """numpy keeps it."""
    ad = ArrayDict({"x": np.arange(3, dtype=">i4")})
    assert by_memory(ad)["x"].dtype == np.dtype(">i4")


def test_a_tracer_is_refused():
    """By JAX, which names it."""

    @jax.jit
    def dump(ad: ArrayDict) -> ArrayDict:
        with pytest.raises(jax.errors.ConcretizationTypeError):
            pickle.dumps(ad, protocol=5)
        return ad

    dump(arrays("flat"))


def test_a_deleted_array_is_refused():
    """By JAX, and the process lives on."""
    ad = ArrayDict({"x": jnp.ones(3)})
    ad["x"].delete()
    for tree in (ad, ad):
        with pytest.raises(RuntimeError, match="deleted"):
            pickle.dumps(tree, protocol=5)


def test_segments_of_other_dtypes_are_pickled_as_before():
    """A packed tree after a cast of its segments."""
    packed = jax.tree.map(lambda s: s.astype(jnp.float16), arrays("many").pack())
    assert as_before(packed)
    assert_same_values(by_memory(packed).unpack(), packed.unpack())


@pytest.mark.parametrize("tree", [arrays, packable])
@pytest.mark.parametrize("name", ["nested", "non_tensors", "empty_inside"])
def test_a_copy_is_what_it_was(name, tree):
    """copy.copy has the same leaves, copy.deepcopy copies of them; non-tensor values likewise."""
    old = tree(name)
    shallow, deep = copy.copy(old), copy.deepcopy(old)
    for new in (shallow, deep):
        assert jax.tree.structure(new) == jax.tree.structure(old)
        assert_same_values(new, old)
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(shallow), jax.tree.leaves(deep), strict=True)
    assert all(a is b and a is not c for a, b, c in pairs)
    if name == "non_tensors":
        assert shallow["d"] is old["d"]
        assert deep["d"] is not old["d"]


def test_a_tree_of_both_frameworks_is_one_message():
    """A dict with several trees in it has a buffer for each."""
    both = {
        "torch": consolidate(zoo.nested()),
        "jax": arrays("nested"),
        "packed": packable("nested"),
    }
    data, buffers = out_of_band(both)
    found = pickle.loads(data, buffers=buffers)
    assert len(buffers) == 3
    assert_same_values(found["jax"], both["jax"])
    assert tdbridge.layout_of(found["torch"]) == tdbridge.layout_of(found["packed"])
