"""Where the arrays are: uncommitted where torch had them, or where `device` and `sharding` say."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdbridge import ArrayDict, LayoutError, LeafTypeError, consolidate, to_jax, to_torch
from tests import zoo
from tests.convert.trees import address, listed, pairs, x64_for

MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS = jax.NamedSharding(MESH, jax.P("x"))
WHOLE = jax.NamedSharding(MESH, jax.P())
CPUS = jax.devices("cpu")


@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("name", zoo.TREES)
def test_arrays_are_uncommitted(name: str, copy: bool | None):
    """No array is bound to the device that it lies on."""
    td = zoo.TREES[name]()
    with x64_for(name):
        for _, _, array in pairs(td, to_jax(td, copy=copy)):
            assert not array.committed
            assert array.devices() == {CPUS[0]}


@pytest.mark.parametrize("copy", [None, True])
def test_arrays_follow_the_argument_beside_them(copy: bool | None):
    """A converted array goes to the device of an array that is bound to one."""
    pinned = jax.device_put(jnp.ones(()), CPUS[5])
    for _, tensor, array in pairs(td := zoo.strided(), to_jax(td, copy=copy)):
        if not tensor.is_complex():
            got = jax.jit(lambda x, y: x.sum() + y)(array, pinned)
            assert got.devices() == {CPUS[5]}
            assert float(got) == float(tensor.sum()) + 1


def test_arrays_mix_with_sharded_parameters():
    """A converted batch and mesh-sharded parameters go into one jitted function."""
    weights = jax.device_put(jnp.arange(8.0), ROWS)
    batch = to_jax(TensorDict({"x": torch.arange(8.0), "t": torch.ones(8, 8).t()}, []))
    got = jax.jit(lambda w, b: w * b["x"] + b["t"].sum(axis=0))(weights, batch)
    assert got.tolist() == [i * i + 8 for i in range(8)]
    assert len(got.devices()) == 8


@pytest.mark.parametrize("packed", [False, True])
def test_a_tensor_may_be_written_as_soon_as_its_array_is_elsewhere(packed: bool):
    """An array that was moved holds what the tensor held, though a transfer takes a while."""
    buffer = consolidate(TensorDict({"x": torch.ones(2**23)}))
    tree = to_jax(buffer, device=CPUS[1], packed=packed)
    buffer["x"].zero_()
    assert float(tree["x"].min()) == 1.0


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", CPUS[0]), (CPUS[0], CPUS[0]), (CPUS[3], CPUS[3])],
    ids=["platform", "first", "fourth"],
)
def test_device_places_and_commits(device: Any, expected: Any):
    """`device`, a Device or the name of a platform, is where every leaf is, and is bound to."""
    td = zoo.nested()
    for path, tensor, array in pairs(td, to_jax(td, device=device)):
        assert array.devices() == {expected}, path
        assert array.committed
        assert zoo.same_bits(np.asarray(array), zoo.as_numpy(tensor))


@pytest.mark.parametrize("sharding", [ROWS, WHOLE, jax.sharding.SingleDeviceSharding(CPUS[2])])
def test_sharding_places_and_commits(sharding: Any):
    """`sharding` is how every leaf lies over the devices; values come back from any of them."""
    td = TensorDict({"x": zoo.pattern("float32", 8, 3), "n": {"y": zoo.pattern("int8", 8)}}, [8])
    ad = to_jax(td, sharding=sharding)
    for _, tensor, array in pairs(td, ad):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
        assert array.committed
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), tensor[shard.index].numpy())
    for path, tensor in zoo.leaves(to_torch(ad)).items():
        assert torch.equal(tensor, td[path])


def test_jax_arrays_in_the_tree_are_placed_too():
    """`sharding` and `device` are for all arrays of the result, jax's own among them."""
    tree = {"t": torch.arange(8.0), "j": jnp.arange(8.0)}
    for array in to_jax(tree, sharding=ROWS).values():
        assert array.sharding == ROWS
    for array in to_jax(tree, device=CPUS[3]).values():
        assert array.devices() == {CPUS[3]}


def test_a_device_of_its_own_platform_shares():
    """`device="cpu"` commits a CPU tensor where it is: nothing moves, so nothing is copied."""
    tensor = torch.arange(16.0)
    assert address(to_jax(tensor, device="cpu")) == address(tensor)


def test_an_unknown_platform_is_named():
    """A platform that is not there raises JAX's own error, which lists those that are."""
    with pytest.raises(RuntimeError, match="abacus"):
        to_jax(torch.ones(2), device="abacus")


@pytest.mark.parametrize("explicit", [False, True])
def test_a_mesh_in_context_is_not_remembered(explicit: bool):
    """Arrays made inside `jax.set_mesh` and outside of it mix with both."""
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((8,), ("m",), axis_types=(kind,))
    tensor = torch.arange(24.0).reshape(8, 3)
    before = to_jax(tensor)
    with jax.set_mesh(mesh):
        inside = to_jax(tensor)
        assert np.array_equal(np.asarray(inside + before), 2 * tensor.numpy())
    after = to_jax(tensor)
    total = jax.jit(lambda a, b, c: a + b + c)(before, inside, after)
    assert np.array_equal(np.asarray(total), 3 * tensor.numpy())


def test_the_default_device_of_jax_does_not_cost_the_sharing():
    """Under `jax.default_device` a CPU tensor is still shared, and uncommitted."""
    tensor = torch.arange(16.0)
    with jax.default_device(CPUS[3]):
        array = to_jax(tensor, copy=False)
    assert address(array) == address(tensor)
    assert not array.committed


def test_a_transfer_guard_allows_what_was_asked_for():
    """A conversion is no implicit transfer: `jax.transfer_guard("disallow")` lets it pass."""
    td = zoo.strided()
    split = jax.device_put(jnp.arange(8.0), ROWS)
    with jax.transfer_guard("disallow"):
        ad = to_jax(td)
        assert torch.equal(to_torch(split), torch.arange(8.0))
        back = to_torch(ad)
    for path, tensor in zoo.leaves(back).items():
        assert zoo.same_bits(zoo.as_numpy(tensor), zoo.expected("strided")[path])


@pytest.mark.parametrize("place", [{"device": "cpu"}, {"sharding": {"l": ROWS, "s": ROWS}}])
def test_a_deleted_array_that_would_be_moved_is_named(place: dict[str, Any]):
    """One error lists it beside what cannot be carried; where it stays, it is let through."""
    array, good = jnp.ones(8), torch.zeros(8)
    array.delete()
    with pytest.raises(LeafTypeError, match="to_jax cannot carry") as error:
        to_jax({"l": [good, array], "s": torch.eye(2).to_sparse()}, **place)
    found = listed(error.value)
    assert found.pop("['l', '1']") == "got an array that was deleted or donated."
    assert list(found) == ["['s']"]
    good.resize_(1000)
    assert to_jax([array, good])[0] is array
    assert to_jax([array, torch.ones(8)], sharding=[None, ROWS])[0] is array


class State(NamedTuple):
    step: Any
    params: Any


COLUMNS = jax.NamedSharding(MESH, jax.P(None, "x"))


def state() -> State:
    td = TensorDict({"w": torch.ones(8, 8), "n": {"b": torch.arange(8)}, "label": "text"}, [8])
    return State(
        torch.tensor(3.0), {"td": td, "l": [torch.ones(8), np.ones(8, np.float32), "s", 3]}
    )


def shardings(form: str) -> State:
    """A place of another kind for each leaf of `state()`, in one of the forms of a tree."""
    td: Any = {"w": COLUMNS, "n": ROWS}
    if form == "arraydict":
        td = ArrayDict({"w": COLUMNS, "n": {"b": ROWS}})
    if form == "mapped":
        mirror = ArrayDict({"w": jnp.ones((8, 8)), "n": {"b": jnp.ones(8)}, "label": "t"}, [8])
        td = jax.tree.map(lambda leaf: COLUMNS if leaf.ndim == 2 else ROWS, mirror)
    if form == "tensordict":
        td = TensorDict({"w": COLUMNS, "n": {"b": ROWS}})
    return State(None, {"td": td, "l": [CPUS[3], None, None, WHOLE]})


@pytest.mark.parametrize("form", ["dict", "arraydict", "mapped", "tensordict"])
def test_a_tree_of_shardings_places_each_leaf(form: str):
    """Each leaf goes where the entry at or above its path says; with None it stays, uncommitted."""
    got = to_jax(state(), sharding=shardings(form))
    assert got.params["td"]["w"].sharding == COLUMNS
    assert got.params["td"]["n", "b"].sharding == ROWS
    assert got.params["td"]["n", "b"].tolist() == list(range(8))
    assert got.params["td"].batch_size == (8,)
    assert got.params["l"][0].devices() == {CPUS[3]}
    assert got.params["l"][0].committed
    for stays in (got.step, got.params["l"][1]):
        assert stays.devices() == {CPUS[0]}
        assert not stays.committed
    assert got.params["l"][2:] == ["s", 3]


def test_a_prefix_is_for_all_that_is_under_it():
    """One sharding above several leaves is for each of them, jax's own arrays among them."""
    tree = {"a": [torch.ones(8), jnp.ones(8)], "b": TensorDict({"x": torch.ones(8)}, [8])}
    got = to_jax(tree, sharding={"a": ROWS, "b": WHOLE})
    assert [array.sharding for array in got["a"]] == [ROWS, ROWS]
    assert got["b"]["x"].sharding == WHOLE
    source = tree["a"][0]
    kept = to_jax(tree, sharding={"a": [None, None], "b": WHOLE})["a"][0]
    assert address(kept) == address(source)


def test_a_tree_of_shardings_with_other_paths_is_refused():
    """Arrays without an entry and entries without a leaf are listed in one error, and no others."""
    tree = {"a": torch.zeros(8), "l": [torch.ones(8), "s"], "td": TensorDict({"x": torch.ones(8)})}
    wrong = {"a": ROWS, "l": [], "td": {"y": ROWS, "none": None}, "m": {"z": CPUS[0]}}
    with pytest.raises(ValueError, match="`sharding` does not have the structure") as error:
        to_jax(tree, sharding=wrong)
    assert listed(error.value) == {
        "['l', '0']": "not in `sharding`.",
        "['td', 'x']": "not in `sharding`.",
        "['td', 'y']": "in `sharding`, and no leaf of the tree.",
        "['m', 'z']": "in `sharding`, and no leaf of the tree.",
    }
    tree["a"].resize_(1000)  # nothing was exported
    with pytest.raises(ValueError, match="`sharding` does not") as error:
        to_jax(TensorDict({"x": torch.ones(8)}), sharding={})
    assert list(listed(error.value)) == ["['x']"]


def test_what_is_no_sharding_is_named():
    """A PartitionSpec, or the name of a platform, in the tree is named with its path."""
    wrong: Any = {"a": jax.P("x"), "b": ["cpu", ROWS]}
    with pytest.raises(ValueError, match=r"jax\.sharding\.Sharding, or a tree") as error:
        to_jax({"a": torch.ones(8), "b": [torch.ones(8), torch.ones(8)]}, sharding=wrong)
    assert listed(error.value) == {
        "['a']": "got P('x',).",
        "['b', '0']": "got 'cpu'.",
    }


def test_a_leaf_that_a_sharding_cannot_cut_is_named():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices("cpu")[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    batch = {"x": torch.zeros(8, 2), "count": torch.tensor(3), "odd": torch.zeros(6)}
    with pytest.raises(LayoutError) as error:
        to_jax(batch, sharding=sharding)
    text = str(error.value)
    assert "['count']: shape () over" in text
    assert "['odd']: shape (6,) over" in text
    assert "of 4 devices" in text
    assert "['x']" not in text
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    found = to_jax(batch, sharding={"x": sharding, "count": whole, "odd": whole})
    assert found["x"].sharding == sharding
