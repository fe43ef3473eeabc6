"""PackedArrayDict: it reads as the ArrayDict that it is, in one flat array per dtype."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optree
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tdbridge
from tdbridge import ArrayDict, FrozenError, LeafTypeError, NarrowingError, PackedArrayDict
from tdbridge.layout import layout_of
from tdbridge.pytrees import segments
from tdbridge.pytrees.packed import over_segments, packed
from tests import zoo
from tests.layout.check import places
from tests.pytrees.trees import STRUCTURES, arrays, assert_same_values, nodes, values

DEVICES = jax.devices("cpu")
each_tree = pytest.mark.parametrize("name", zoo.TREES)


@pytest.fixture
def compiled():
    """The programs that were compiled since, one entry each."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def params() -> ArrayDict:
    """Floats of two dtypes, integers and a constant; nested."""
    return ArrayDict(
        {
            "w": jnp.arange(6.0).reshape(3, 2) + 1,
            "b": jnp.array([0.5, -2.0]),
            "half": jnp.array([1.5, 2.5, 3.5], jnp.bfloat16),
            "n": {"scale": jnp.float32(3.0), "steps": jnp.arange(4)},
            "name": "mlp",
        }
    )


def floats() -> ArrayDict:
    return params().exclude(("n", "steps"))


def loss(tree: Any) -> jax.Array:
    """Each float leaf counts in another way, and not linearly."""
    terms = [tree["w"] ** 3, 2 * tree["b"] ** 2, tree["n"]["scale"] ** 2]
    terms.append((tree["half"] ** 2).astype(jnp.float32))
    return jnp.stack([term.sum() for term in terms]).sum()


# -- reading ----------------------------------------------------------------------------------


@each_tree
def test_it_reads_as_the_arraydict_that_was_packed(name):
    """Keys, values, membership, batch sizes, names and constants are the same at every level."""
    ad = arrays(name)
    p = ad.pack()
    for more in [(), (True,), (False, True), (True, True)]:
        assert list(p.keys(*more)) == list(ad.keys(*more))
        assert [key for key, _ in p.items(*more)] == [key for key, _ in ad.items(*more)]
        assert len(p.values(*more)) == len(ad.values(*more))
    assert (len(p), list(p)) == (len(ad), list(ad))
    for key, value in ad.items(True):
        assert key in p
        for found in (p[key], p.get(key)):
            assert type(found) is type(value)
            if isinstance(value, (ArrayDict, jax.Array)):
                assert_same_values(found, value)
            else:
                assert repr(found) == repr(value)
    for path, node in nodes(ad).items():
        found = p[path] if path else p
        assert (found.batch_size, found.names) == (node.batch_size, node.names)
        assert (found.shape, found.tensorclass) == (node.batch_size, node.tensorclass)
    assert repr(p) == f"Packed{ad!r}"


@each_tree
def test_unpack_gives_the_tree_back(name):
    """The same definition, and the bits that numpy gives for each leaf of the zoo."""
    ad = arrays(name)
    unpacked = ad.pack().unpack()
    assert jax.tree.structure(unpacked) == jax.tree.structure(ad)
    for path, expected in zoo.expected(name).items():
        assert zoo.same_bits(np.asarray(unpacked[path]), expected), path
    assert_same_values(unpacked.to_dict(), ad.pack().to_dict())


@each_tree
def test_segments_are_the_bytes_of_the_layout(name):
    """One flat array per dtype, sorted: each leaf at the place of the layout, zeros between."""
    expected = zoo.expected(name)
    starts, nbytes = places(expected)
    buffer = np.zeros(nbytes, np.uint8)
    for path, array in expected.items():
        raw = np.frombuffer(array.tobytes(), np.uint8)
        buffer[starts[path] : starts[path] + len(raw)] = raw
    p = arrays(name).pack()
    assert [str(s.dtype) for s in p.segments] == sorted({a.dtype.name for a in expected.values()})
    assert b"".join(np.asarray(s).tobytes() for s in p.segments) == buffer.tobytes()
    assert all(s.ndim == 1 and not s.committed for s in p.segments)


def test_what_is_missing():
    """`get` gives the default whatever it is, `[]` raises as on an ArrayDict."""
    p, default = params().pack(), ArrayDict({"a": jnp.ones(2)})
    assert p.get("missing", default) is default
    assert p.get(("w", "deeper")) is None
    assert p.get((), 1) == 1
    for key in ["missing", ("n", "missing"), ("w", "deeper")]:
        assert key not in p
        with pytest.raises(KeyError):
            p[key]


@pytest.mark.parametrize(
    "index", [0, -1, slice(1, 3), (slice(None), None), np.array([0, 2]), np.arange(4) % 2 == 0]
)
def test_an_index_goes_over_the_batch(index):
    """As on the ArrayDict."""
    ad = arrays("nested")
    assert_same_values(ad.pack()[index], ad[index])
    assert ad.pack()[index].batch_size == ad[index].batch_size


def test_fields_of_a_tensorclass():
    """Fields are attributes, also one that is None; what an ArrayDict can do is not there."""
    p = arrays("tensorclass").pack()
    assert (p.label, p.weight, p.after.label) == ("now", None, "after")
    assert zoo.same_bits(np.asarray(p.obs), zoo.expected("tensorclass")[("obs",)])
    for name in ("select", "replace", "map", "nothing"):
        with pytest.raises(AttributeError, match="unpack"):
            getattr(p, name)
    with pytest.raises(AttributeError, match=r"unpack\(\) gives"):
        _ = params().pack().w


def test_it_is_compared_element_by_element():
    """`==` and `!=` give trees of booleans, with a packed tree and with an ArrayDict."""
    ad = floats()
    p = ad.pack()
    other = ad.replace(b=jnp.array([0.5, 7.0]))
    for right in (other, other.pack()):
        assert (p == right)["b"].tolist() == [True, False]
        assert (p != right)["b"].tolist() == [False, True]
        assert bool((p == right)["n"].all())
    with pytest.raises(TypeError, match="ambiguous"):
        bool(p)


def test_it_is_immutable():
    """Each way to change it raises, and says what to do."""
    p = params().pack()
    for change in (
        lambda: p.__setitem__("w", 1),
        lambda: p.__delitem__("w"),
        lambda: setattr(p, "segments", ()),
        lambda: delattr(p, "segments"),
    ):
        with pytest.raises(FrozenError, match=r"packed\.unpack\(\)"):
            change()
    for arguments in ((), ({"w": jnp.ones(2)},)):
        with pytest.raises(TypeError, match=r"ad\.pack\(\)"):
            PackedArrayDict(*arguments)


def test_constants_are_those_of_the_own_tree():
    """A list in one tree that is written to later does not show in an equal tree."""
    first, second = (ArrayDict({"x": jnp.ones(2), "s": [1]}) for _ in range(2))
    assert first.pack()["s"] == [1]
    first["s"].append(2)
    assert second.pack()["s"] == [1]
    assert second.pack().unpack()["s"] is second["s"]


@pytest.mark.parametrize("name", ["nested", "narrow_dtypes", "zero_size"])
def test_memory_is_shared_with_the_segments(name):
    """Outside of jit on one CPU device a leaf is a slice of its segment, uncopied."""
    p = arrays(name).pack()
    starts = {str(s.dtype): s.unsafe_buffer_pointer() for s in p.segments}
    offsets, _ = places(zoo.expected(name))
    first = {}
    for path, array in sorted(zoo.expected(name).items(), key=lambda item: offsets[item[0]]):
        first.setdefault(array.dtype.name, offsets[path])
        if array.size:
            at = starts[array.dtype.name] + offsets[path] - first[array.dtype.name]
            assert p[path].unsafe_buffer_pointer() == at
            assert p.unpack()[path].unsafe_buffer_pointer() == at


# -- inside JAX ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRUCTURES)
def test_jit_takes_and_gives_it(name):
    """Through jit, and packed and unpacked inside of it, every bit and the definition stay."""
    ad = arrays(name)
    p = ad.pack()
    for function in (lambda t: t, lambda t: t.unpack().pack()):
        found = jax.jit(function)(p)
        assert jax.tree.structure(found) == jax.tree.structure(p)
        assert_same_values(found.unpack(), ad)
    assert_same_values(jax.jit(lambda t: t.unpack())(p), ad)
    leaf = next(iter(ad.keys(True, True)), None)
    if leaf is not None:
        assert_same_values(jax.jit(lambda t: t[leaf])(p), ad[leaf])


@pytest.mark.parametrize("read", ["leaf by leaf", "unpacked"])
def test_a_gradient_is_that_of_the_plain_tree(read):
    """Packed as the parameters are; the padding has no gradient."""
    ad = floats()
    through = loss if read == "leaf by leaf" else lambda p: loss(p.unpack())
    expected = jax.grad(loss)(ad)
    for function in (jax.grad(through), jax.jit(jax.grad(through))):
        gradient = function(ad.pack())
        assert isinstance(gradient, PackedArrayDict)
        assert_same_values(gradient.unpack(), expected)
        assert np.asarray(gradient["w"]).tolist() == [[3, 12], [27, 48], [75, 108]]
        assert sum(np.count_nonzero(np.asarray(s)) for s in gradient.segments) == 2 + 6 + 3 + 1


def test_gradients_of_integers_are_float0():
    """With `allow_int`, an integer segment has the gradient that JAX has for integers."""
    gradient = jax.grad(loss, allow_int=True)(params().pack())
    assert gradient["n", "steps"].dtype == jax.dtypes.float0
    assert gradient["n", "steps"].shape == (4,)
    assert gradient["b"].tolist() == [2.0, -8.0]


def test_jvp():
    """A tangent is a packed tree; the derivative is that of the plain tree."""
    ad = floats()
    tangent = ad.map(jnp.ones_like)
    expected = jax.jvp(loss, (ad,), (tangent,))
    found = jax.jvp(lambda p: loss(p.unpack()), (ad.pack(),), (tangent.pack(),))
    assert np.array(found).tolist() == np.array(expected).tolist()


def test_tree_map_is_one_call_per_segment():
    """It goes over the segments, and a segment that was cast is read in its new dtype."""
    p = floats().pack()
    calls = []
    cast = jax.tree.map(lambda s: calls.append(s.shape) or s.astype(jnp.float16), p)
    assert len(calls) == len(p.segments) == 2
    assert cast["w"].dtype == jnp.float16
    assert cast["w"].tolist() == floats()["w"].tolist()
    assert "w: float16[3,2]" in repr(cast)
    with pytest.raises(ValueError, match="pytree structure error"):
        jax.tree.map(lambda a, b: a + b, p, ArrayDict({"i": jnp.arange(2)}).pack())


def test_an_optimizer_step_is_that_of_the_plain_tree():
    """Adam with weight decay is elementwise: packed or not, the same parameters, bit for bit."""
    ad = floats().exclude("half")
    found = []
    for tree in (ad, ad.pack()):
        optimizer = optax.adamw(1e-2)
        state = optimizer.init(tree)
        for _ in range(3):
            gradients = jax.tree.map(lambda x: x * x - 1, tree)
            with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32
                updates, state = optimizer.update(gradients, state, tree)
            tree = optax.apply_updates(tree, updates)
        found.append(tree)
    assert_same_values(found[1].unpack(), found[0])


def test_vmap_and_scan_say_what_to_do():
    """A segment has no batch dimension, so a mapped packed tree raises where it is read."""
    td = arrays("nested").select("obs", ("next", "reward"))  # one segment: JAX sees no difference
    with pytest.raises(ValueError, match=r"shape \(32,\), got shape \(\).*call unpack\(\) before"):
        jax.vmap(lambda p: p["obs"])(td.pack())
    with pytest.raises(ValueError, match=r"call unpack\(\) before vmap or scan"):
        jax.lax.scan(lambda c, p: (c, p.unpack()), 0, td.pack())
    with pytest.raises(ValueError, match=r"segments\['bool'\] \(call \.unpack\(\) before vmap\)"):
        jax.vmap(lambda p: p["obs"])(arrays("nested").pack())


def test_packed_trees_may_be_made_and_read_inside_of_vmap():
    """Where vmap adds a dimension to whole segments, each member is a packed tree."""
    stacked = jax.vmap(lambda i: ArrayDict({"w": jnp.arange(3.0) + i, "b": i}).pack())(
        jnp.arange(2.0)
    )
    sums = jax.vmap(lambda p: p["w"].sum() + p["b"])(stacked)
    assert sums.tolist() == [3.0, 7.0]
    with pytest.raises(ValueError, match=r"shape \(32,\), got shape \(2, 32\)"):
        stacked["w"]
    assert jax.vmap(lambda p, x: p["w"][0] * x, (None, 0))(floats().pack(), jnp.ones(2)).shape == (
        2,
        2,
    )


@pytest.mark.parametrize("value", [None, True, "text", jnp.ones((2, 2))], ids=repr)
def test_what_is_no_segment_is_not_read(value):
    """Over masks or None it is a tree all the same; reading a leaf says what was found there."""
    p = jax.tree.map(lambda _: value, floats().pack())
    assert len(jax.tree.leaves(p, is_leaf=lambda x: x is None)) == 2
    kind = "shape (2, 2)" if isinstance(value, jax.Array) else type(value).__name__
    with pytest.raises(ValueError, match="segment of this PackedArrayDict has shape") as error:
        p["w"]
    assert f"got {kind}." in str(error.value)


def test_shapes_without_values():
    """Over what `eval_shape` gives, leaves are ShapeDtypeStructs."""
    abstract: Any = jax.eval_shape(lambda: floats().pack())
    assert abstract["w"] == jax.ShapeDtypeStruct((3, 2), jnp.float32)
    assert abstract.unpack()["half"] == jax.ShapeDtypeStruct((3,), jnp.bfloat16)


def test_numpy_segments_give_numpy_leaves():
    """What `device_get` gives reads as views of its arrays."""
    host = jax.device_get(floats().pack())
    assert type(host["w"]) is np.ndarray
    assert np.shares_memory(host["w"], next(s for s in host.segments if s.dtype == np.float32))
    assert host["w"].tolist() == floats()["w"].tolist()


# -- 64 bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["first device", "second device", "jit"])
def test_what_is_64_bits_wide_stays_so(where):
    """With x64 off too, packing and reading cut no jax array to 32 bits."""
    expected = zoo.expected("all_dtypes")
    ad = arrays("all_dtypes")
    if where == "second device":
        ad = jax.device_put(ad, DEVICES[1])
    pack, unpack = ArrayDict.pack, PackedArrayDict.unpack
    p = jax.jit(pack)(ad) if where == "jit" else pack(ad)
    unpacked = jax.jit(unpack)(p) if where == "jit" else unpack(p)
    for path, array in expected.items():
        assert zoo.same_bits(np.asarray(unpacked[path]), array), path
        assert zoo.same_bits(np.asarray(p[path]), array), path


def test_numpy_leaves_that_jax_would_narrow_are_named():
    """A numpy leaf of 64 bits becomes a jax array, which it cannot exactly while x64 is off."""
    ad = ArrayDict({"x": np.ones(2, np.float32), "n": {"i": np.arange(3), "d": np.ones(2)}})
    with pytest.raises(NarrowingError) as error:
        ad.pack()
    assert "['n', 'i']: got a numpy array of int64" in str(error.value)
    assert "['n', 'd']: got a numpy array of float64" in str(error.value)
    assert "['x']" not in str(error.value)
    with jax.enable_x64(True):
        assert_same_values(ad.pack().unpack(), ad)


# -- what cannot be packed ----------------------------------------------------------------------


def test_leaves_without_values_are_all_named():
    """One error for all of them, before anything is copied."""
    deleted = jnp.ones(3)
    deleted.delete()
    whole = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec())
    ad = ArrayDict(
        {
            "ok": jnp.ones(2),
            "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
            "deleted": deleted,
            "masked": np.ma.masked_array(np.ones(2, np.float32), [True, False]),
            "n": {"split": jax.device_put(jnp.ones(8), whole)},
        }
    )
    with pytest.raises(LeafTypeError) as error:
        ad.pack()
    text = str(error.value)
    assert "['shape']: got a ShapeDtypeStruct, which holds no values." in text
    assert "['deleted']: got an array that was deleted or donated." in text
    assert "['masked']: got a MaskedArray" in text
    assert "['n', 'split']: got an array over a mesh" in text
    assert "['ok']" not in text


@pytest.mark.parametrize("leaf", [None, jax.random.key(0)], ids=["None", "key"])
def test_what_has_no_dtype_of_ours_is_refused(leaf):
    """None and PRNG keys have no place in a buffer."""
    ad = jax.tree.map(lambda x: leaf if x.ndim == 2 else x, floats(), is_leaf=lambda x: x is None)
    kind = "a NoneType" if leaf is None else "PRNG keys"
    with pytest.raises(LeafTypeError, match=rf"\['w'\]: got {kind}, which"):
        ad.pack()


def test_a_layout_with_keys_is_refused():
    """The torch side of PRNG keys is a buffer of integers, but a gradient step on it makes none."""
    keys = tdbridge.to_torch(ArrayDict({"x": jnp.ones(2), "rng": jax.random.key(0)}))
    with pytest.raises(LeafTypeError, match=r"\['rng'\]: got PRNG keys.*beside the packed tree"):
        packed(layout_of(keys), [])


def test_leaves_on_two_devices_are_named():
    """They have to be brought together first."""
    ad = ArrayDict({"a": jax.device_put(jnp.ones(2), DEVICES[1]), "b": jnp.ones(2)})
    with pytest.raises(LeafTypeError) as error:
        ad.pack()
    assert "['a']: got an array on " in str(error.value)
    assert "['b']: got an array on " in str(error.value)


# -- devices and compilation -------------------------------------------------------------------


def test_on_another_device():
    """Packed, moved and read there, all is committed there, and the same."""
    ad = jax.device_put(params(), DEVICES[1])
    moved = jax.device_put(params().pack(), DEVICES[1])
    for p in (ad.pack(), moved):
        assert {(s.device, s.committed) for s in p.segments} == {(DEVICES[1], True)}
        for leaf in [*jax.tree.leaves(p.unpack()), p["w"], p["n", "steps"]]:
            assert (leaf.device, leaf.committed) == (DEVICES[1], True)
        assert_same_values(p.unpack(), params())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_over_a_mesh(kind):
    """Segments split over a mesh are read and differentiated; the gradient is split as they are."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    split = NamedSharding(mesh, PartitionSpec("x"))
    p = jax.device_put(floats().exclude("half").pack(), split)
    expected = floats().exclude("half")
    assert_same_values(p.unpack(), expected)
    assert p["b"].tolist() == [0.5, -2.0]
    square = lambda tree: sum((leaf**2).sum() for leaf in jax.tree.leaves(tree))  # noqa: E731
    gradient = jax.jit(jax.grad(lambda q: square(q.unpack())))(p)
    assert gradient.segments[0].sharding == split
    assert_same_values(gradient.unpack(), jax.grad(square)(expected))


def test_a_place_beyond_32_bits(monkeypatch):
    """In a segment that is longer than an int32 counts, leaves are cut out at constant places."""
    p = jax.device_put(floats().pack(), DEVICES[1])
    monkeypatch.setattr(segments, "_INT32", 1)
    monkeypatch.setattr(segments, "_slice", None)
    assert_same_values(p.unpack(), floats())


def test_on_one_cpu_device_nothing_is_compiled(compiled):
    """Neither packing nor reading, whatever the shapes."""
    ad = ArrayDict({f"l{i}": np.full((i + 2, 3), i, np.float32) for i in range(20)})
    p = ad.pack()
    moved = jax.device_put(p, DEVICES[0])
    compiled.clear()
    p = ad.pack()
    for tree in (p, moved):
        assert [leaf[0, 0].item() for leaf in map(np.asarray, tree.unpack().values())][3] > 0
        _ = tree["l7"], tree["l8"]
    assert moved["l7"].committed
    assert not p["l7"].committed
    assert compiled == []


@pytest.mark.parametrize("place", ["split", "replicated"])
def test_elsewhere_one_program_reads_all_leaves_of_a_shape(compiled, place):
    """The number of programs does not grow with the leaves."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x") if place == "split" else PartitionSpec()
    counts = []
    for n in (50, 500):
        ad = ArrayDict({f"l{i:03}": np.full(5, i, np.float32) for i in range(n)})
        p = jax.device_put(ad.pack(), NamedSharding(mesh, spec))
        compiled.clear()
        leaves = p.unpack().values()
        counts.append(len(compiled))
        assert [int(leaf[0]) for leaf in map(np.asarray, leaves)] == list(range(n))
    assert counts[0] == counts[1] <= 2


# -- lifetimes ----------------------------------------------------------------------------------


def own_memory() -> PackedArrayDict:
    """Segments in memory that XLA made, and may reuse."""
    return jax.tree.map(lambda s: s + 1, floats().exclude("half").pack())


fill = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 5, tree), donate_argnums=0)


def test_donated_segments_leave_the_leaves_alone():
    """A leaf that was read keeps its values when the packed tree is donated."""
    p = own_memory()
    leaves = p.unpack()
    expected = {path: leaf.copy() for path, leaf in values(leaves).items()}
    assert jax.block_until_ready(fill(p))["b"].tolist() == [-5, -5]
    assert {path: leaf.tolist() for path, leaf in values(leaves).items()} == {
        path: leaf.tolist() for path, leaf in expected.items()
    }


def test_donated_leaves_leave_the_segments_alone():
    """The other way round."""
    p = own_memory()
    jax.block_until_ready(fill(p.unpack()))
    assert p["b"].tolist() == [1.5, -1.0]
    assert p["w"].tolist() == (np.arange(6.0).reshape(3, 2) + 2).tolist()


def test_leaves_outlive_deleted_segments():
    """The memory is kept as long as one of them needs it, and the deleted tree raises."""
    p = own_memory()
    b = p["b"]
    for segment in p.segments:
        segment.delete()
    blocks = [jnp.full(segment.shape, -1.0) for segment in p.segments for _ in range(50)]
    assert b.tolist() == [1.5, -1.0]
    assert len(blocks) == 50
    with pytest.raises(RuntimeError, match="deleted"):
        p["b"]


# -- other registries and formats -----------------------------------------------------------------

CARRIED = ["nested", "empty_inside", "tensorclass_inside", "non_tensors", "subclass"]


@pytest.mark.parametrize("name", CARRIED)
def test_a_pickle_or_a_copy_reads_the_same(name):
    """And a copy has the same definition as its original."""
    p = arrays(name).pack()
    for other in (pickle.loads(pickle.dumps(p)), copy.copy(p), copy.deepcopy(p)):
        assert jax.tree.structure(other) == jax.tree.structure(p)
        assert_same_values(other.unpack(), p.unpack())


def test_optree_has_the_segments():
    """Its leaves are those of JAX; an accessor reads a segment, not an element of the batch."""
    p = arrays("nested").pack()
    flattened: Any = optree.tree_flatten_with_accessor(p)
    accessors, leaves, treespec = flattened
    assert all(a is b for a, b in zip(leaves, p.segments, strict=True))
    assert all(a(p) is s for a, s in zip(accessors, p.segments, strict=True))
    assert accessors[1].codify("p") == "p.segments[1]"
    back: Any = optree.tree_unflatten(treespec, leaves)
    assert_same_values(back.unpack(), p.unpack())


def test_key_paths_name_the_dtype():
    """As JAX prints them."""
    found = [
        jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_leaves_with_path(params().pack())
    ]
    assert [text.split(" ")[0] for text in found] == [
        f".segments[{name!r}]" for name in ("bfloat16", "float32", "int32")
    ]


@pytest.mark.parametrize("name", CARRIED)
def test_an_exported_function_takes_and_gives_it(name):
    """Serialised and read again, with names, classes and constants."""
    p = jax.tree.map(lambda s: s, arrays(name).pack())
    blob = export.export(jax.jit(lambda tree: tree))(p).serialize()
    found: Any = export.deserialize(blob).call(p)
    assert jax.tree.structure(found) == jax.tree.structure(p)
    assert_same_values(found.unpack(), p.unpack())


@pytest.mark.parametrize("format", ["dcp", "orbax"])
def test_a_checkpoint_has_the_leaves(format, tmp_path):
    """A packed tree is saved leaf by leaf, and read back as an ArrayDict."""
    ad = floats().exclude("half", "name")
    tdbridge.checkpoint.save(tmp_path / "c", ad.pack(), format=format)
    found = tdbridge.checkpoint.load(tmp_path / "c", to="jax")
    assert_same_values(jax.tree.map(lambda x: x, found), ad)


def test_unflattening_checks_nothing():
    """JAX puts anything in the place of the segments, and `over_segments` takes it."""
    p = params().pack()
    marker = object()
    assert over_segments(p._layout, [marker] * 3).segments == (marker,) * 3
    assert jax.tree.leaves(jax.tree.map(lambda _: marker, p)) == [marker] * 3
