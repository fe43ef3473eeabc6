"""Lazy stacks, parameters, values per element, unbatched and jagged leaves as pytrees."""

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch
from jax import export
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
)

import tdbridge
from tdbridge import ArrayDict, to_jax, to_torch
from tdbridge.pytrees.export import from_bytes, to_bytes
from tests import zoo

REGISTRIES: list[tuple[Any, Any, Any]] = [
    (jax.tree.leaves, jax.tree.unflatten, jax.tree.structure),
    (optree.tree_leaves, optree.tree_unflatten, optree.tree_structure),
]
STACKS = ["lazy", "lazy_named", "lazy_of_lazy", "lazy_leafless", "lazy_of_tensorclasses",
          "lazy_inside", "params", "params_inside"]  # fmt: skip
"""Nodes of another class in torch, with leaves that JAX can have arrays for."""

each_kind = pytest.mark.parametrize("name", zoo.KINDS)


def arrays(name: str) -> Any:
    """A kind of tree as an ArrayDict; 64-bit leaves stay 64-bit."""
    with jax.enable_x64(True):
        return to_jax(zoo.KINDS[name]())


def in_jax(name: str) -> Any:
    """A kind of tree of torch's class over jax arrays."""
    return jax.tree.map(lambda leaf: jnp.asarray(zoo.as_numpy(leaf)), zoo.KINDS[name]())


# --- the registries


@each_kind
def test_a_tree_is_flattened_and_made_again(name: str):
    """The same tree over its leaves, as an ArrayDict and in torch; definitions are equal."""
    for flatten, unflatten, structure in REGISTRIES:
        for make in (zoo.KINDS[name], lambda: arrays(name)):
            tree = make()
            back = unflatten(structure(tree), flatten(tree))
            assert structure(back) == structure(tree) == structure(make())
            assert hash(structure(back)) == hash(structure(make()))
            if not isinstance(tree, ArrayDict):
                assert zoo.described(back) == zoo.described(tree)


OTHERS = [True, None, "text", object(), 3.5, jnp.ones(3), np.ones((2,) * 5), torch.ones(())]


@each_kind
def test_any_leaves_make_a_tree_of_the_same_definition(name: str):
    """Masks, None, arrays of other ranks: JAX takes the tree for one of the same structure."""

    def is_leaf(value: Any) -> bool:
        return value is None

    for tree in (zoo.KINDS[name](), arrays(name)):
        leaves, definition = jax.tree.flatten(tree)
        for other in OTHERS:
            made = jax.tree.unflatten(definition, [other] * len(leaves))
            assert type(made) is type(tree)
            assert jax.tree.structure(made, is_leaf=is_leaf) == definition
            pairs = jax.tree.map(lambda a, b: (a, b), tree, made, is_leaf=is_leaf)
            assert type(pairs) is type(tree)


def test_members_that_cannot_be_stacked_are_a_tensordict_of_them():
    """After a map that gives the members other batch ranks, each stands under its number."""
    members = TensorDict({"x": torch.ones(2)}, [2]), TensorDict({"y": torch.ones(3, 1)}, [3])
    tree: Any = jax.tree.map(lambda _: jnp.zeros(4), LazyStackedTensorDict(*members))
    assert type(tree) is TensorDict
    assert tree.is_locked
    again = jax.tree.map(lambda leaf: leaf + 1, tree)
    assert (again["0", "x"].tolist(), again["1", "y"].tolist()) == ([1] * 4, [1] * 4)
    assert jax.tree.structure(again) == jax.tree.structure(tree)


def test_a_changed_stack_is_described_anew():
    """A tree of masks that was unlocked and changed is no longer what it was made from."""
    masks = jax.tree.map(lambda _: True, zoo.lazy())
    definition = jax.tree.structure(masks)
    masks.unlock_().append(masks.tensordicts[0])
    assert jax.tree.structure(masks) != definition
    assert len(jax.tree.leaves(masks)) == 3 * 4


@pytest.mark.parametrize("name", STACKS)
def test_jit_takes_and_gives_torchs_classes(name: str):
    """Over jax arrays the tree keeps its class through jit, and to_torch gives the same tree."""
    tree = in_jax(name)
    out = jax.jit(lambda x: jax.tree.map(jnp.copy, x))(tree)
    assert jax.tree.structure(out) == jax.tree.structure(zoo.KINDS[name]())
    assert zoo.described(to_torch(out)) == zoo.described(zoo.KINDS[name]())


@pytest.mark.parametrize("name", ["lazy", "lazy_named", "lazy_of_lazy"])
def test_vmap_takes_a_dimension_of_the_members_away(name: str):
    """Inside, the members have no batch; the tree that comes out is the one that went in."""
    tree, seen = in_jax(name), []

    def row(part: Any) -> Any:
        seen.append(type(part))
        return jax.tree.map(lambda leaf: leaf, part)

    out = jax.vmap(row)(tree)
    assert seen == [LazyStackedTensorDict]
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert zoo.described(to_torch(out)) == zoo.described(zoo.KINDS[name]())


@each_kind
def test_an_arraydict_goes_through_jit(name: str):
    """One trace for equal trees, and the same tree on the other side."""
    traces = []

    @jax.jit
    def copy(tree: Any) -> Any:
        traces.append(tree)
        return jax.tree.map(jnp.copy, tree)

    with jax.enable_x64(True):
        first = copy(arrays(name))
        copy(first)
        assert zoo.described(to_torch(first)) == zoo.described(zoo.KINDS[name]())
    assert len(traces) == 1


@each_kind
def test_an_arraydict_is_pickled_and_its_definition_exported(name: str):
    """What stands apart from the batch is written too: definition and tree come back equal."""
    ad = pickle.loads(pickle.dumps(arrays(name)))
    assert jax.tree.structure(ad) == jax.tree.structure(arrays(name))
    assert zoo.described(to_torch(ad)) == zoo.described(zoo.KINDS[name]())
    assert from_bytes(to_bytes(ad._definition)) == ad._definition


def test_an_exported_function_takes_unbatched_and_lazy_trees():
    """Serialised and read again, it computes the same on trees with dimensions of None."""
    ad = ArrayDict({}, []).replace(u=to_jax(zoo.unbatched()), l=to_jax(zoo.lazy_inside()))
    function = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf, tree))
    out: Any = export.deserialize(export.export(function)(ad).serialize()).call(ad)
    assert jax.tree.structure(out) == jax.tree.structure(ad)
    assert zoo.described(to_torch(out["u"])) == zoo.described(zoo.unbatched())


def test_register_names_the_kinds():
    """They are registered already, and registering them again is no error."""
    for cls in (LazyStackedTensorDict, TensorDictParams):
        assert tdbridge.register(cls) is cls


# --- lazy stacks as ArrayDicts


def test_a_member_is_read_by_its_number():
    """The members of a lazy stack are nested trees; a key of theirs is a KeyError that says so."""
    ad = to_jax({"l": zoo.lazy()})["l"]
    assert ad["1", "obs"].shape == (4, 3)
    message = r"'obs' is not among the keys .*: read a member, ad\['0', 'obs'\], or stack"
    with pytest.raises(KeyError, match=message):
        ad["obs"]
    members = [ad[str(i)] for i in range(2)]
    stacked = ArrayDict.stack(members, ad["stack_dim"])
    np.testing.assert_array_equal(stacked["obs"], zoo.lazy()["obs"].numpy())


CHANGES: list[Callable[[Any], Any]] = [
    lambda ad: ad[0],
    lambda ad: ad[:1],
    lambda ad: ad.reshape(-1, 1),
    lambda ad: ArrayDict.stack([ad, ad]),
    lambda ad: ArrayDict.cat([ad, ad]),
]


@pytest.mark.parametrize("name", ["lazy", "jagged", "lazy_of_jagged"])
def test_what_has_no_batch_dimensions_is_not_indexed(name: str):
    """A lazy stack and a jagged leaf say what to do instead, at the root and inside."""
    ad = ArrayDict({"a": jnp.zeros((2, 1)), "k": arrays(name)}, [2])
    assert ad.batch_size == (2,)
    for tree in (arrays(name), ad, ad.select("k")):
        for change in CHANGES:
            with pytest.raises(ValueError, match="index or stack its parts, or make the leaf"):
                change(tree)
    members = LazyStackedTensorDict(*[TensorDict({"x": torch.zeros(n)}) for n in (1, 2)])
    with pytest.raises(ValueError, match="index or stack its parts, or make the leaf"):
        to_jax(members)[0]


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda ad: ad.select(("l", "0")), r"\['l'\]: .* without \['stack_dim'\]"),
        (lambda ad: ad.replace({("l", "x"): jnp.ones(4)}), r"\['l'\]: .* with \['x'\]"),
        (lambda ad: ad.exclude(("j", "offsets")), r"\['j'\]: .* without \['offsets'\]"),
    ],
)
def test_a_stack_or_a_jagged_tensor_has_to_be_whole(change: Any, got: str):
    """What was taken apart in JAX is refused by its path, not made into something else."""
    ad = ArrayDict({"l": arrays("lazy"), "j": arrays("jagged")["j"]})
    assert to_torch(ad)["l"].batch_size == torch.Size([2, 4])
    with pytest.raises(tdbridge.LeafTypeError, match=got):
        to_torch(change(ad))


def test_the_members_and_parts_may_be_changed():
    """A member more, and other values in a jagged tensor, are another stack and another tensor."""
    ad = arrays("lazy")
    assert to_torch(ad.replace({"2": ad["0"]})).batch_size == torch.Size([3, 4])
    jagged = to_jax(zoo.jagged())
    doubled = to_torch(jagged.replace({("j", "values"): jagged["j", "values"] * 2}))
    rows = [zoo.as_numpy(row) * 2 for row in zoo.jagged()["j"].unbind()]
    for row, expected in zip(doubled["j"].unbind(), rows, strict=True):
        np.testing.assert_array_equal(row.numpy(), expected)


# --- unbatched leaves


def unbatched() -> ArrayDict:
    return to_jax(zoo.unbatched())


@pytest.mark.parametrize(
    ("change", "size"),
    [
        (lambda ad: ad[1], ()),
        (lambda ad: ad[None, 1:3], (1, 2)),
        (lambda ad: ad.reshape(2, 2), (2, 2)),
        (lambda ad: ArrayDict.stack([ad, ad], 1), (4, 2)),
        (lambda ad: ArrayDict.cat([ad, unbatched()]), (8,)),
        (lambda ad: ad.select("u", "x"), (4,)),
        (lambda ad: ad.replace(x=ad["x"] * 2), (4,)),
        (lambda ad: ad.flatten_keys(), (4,)),
        (lambda ad: ad.map(lambda leaf: leaf), (4,)),
    ],
)
def test_an_unbatched_leaf_is_kept_by_what_changes_the_batch(change: Any, size: tuple[int, ...]):
    """It stays whole, and what comes back in torch is an UnbatchedTensor of the new batch size."""
    ad = change(unbatched())
    assert ad.batch_size == size
    assert ad["u"].shape == (5,)
    back = to_torch(ad)
    assert isinstance(back.get("u"), UnbatchedTensor)
    assert back.get("u").batch_size == torch.Size(size)


@pytest.mark.parametrize("join", [ArrayDict.stack, ArrayDict.cat])
def test_unbatched_leaves_that_differ_are_not_joined(join: Any):
    """There is one value for the whole batch: another one is a ValueError that names the key."""
    ad = unbatched()
    for other in (ad["u"] + 1, ad["u"][:4], ad["u"].astype(jnp.float16)):
        with pytest.raises(ValueError, match=r"'u' is not batched and differs between the trees"):
            join([ad, ad.replace(u=other)])
    joined = join([ad.exclude("u"), ad.replace(u=ad["u"] + 1).exclude("u")])
    assert "u" not in joined


def test_equal_unbatched_leaves_are_joined_by_their_bits():
    """NaN is equal to itself here; inside jit it has to be one leaf, for nobody knows its value."""
    first, second = (unbatched().replace(u=np.array([np.nan, 1], "float32")) for _ in range(2))
    assert np.isnan(ArrayDict.stack([first, second])["u"][0])
    shared = jax.jit(lambda ad: ArrayDict.cat([ad, ad.replace(x=ad["x"] * 2)]))(first)
    assert (shared.batch_size, shared["u"].shape) == ((8,), (2,))
    with pytest.raises(ValueError, match="or may while JAX traces"):
        jax.jit(lambda a, b: ArrayDict.cat([a, b]))(first, second)


def test_what_replaces_an_unbatched_leaf_is_unbatched():
    """An array of any shape takes its place; only exclude makes room for a batched one."""
    ad = unbatched()
    new = ad.replace({"u": jnp.ones((7, 2)), ("n", "u"): np.zeros(1)})
    assert (new.batch_size, new["u"].shape, new["n", "u"].shape) == ((4,), (7, 2), (1,))
    assert new[0]["u"].shape == (7, 2)
    assert ad.replace(u=2.0)[0]["u"].shape == ()
    assert ad.exclude("u").replace(u=jnp.ones((4, 2)))[0]["u"].shape == (2,)
    assert ad.replace(u="text")["u"] == "text"


def test_an_unbatched_leaf_is_known_in_a_tensordict_of_arrays():
    """A TensorDict that JAX has put arrays into is converted with the unbatched leaves it had."""
    td = in_jax("unbatched")
    assert to_jax(td).batch_size == (4,)
    assert to_jax(td)[0]["u"].shape == (5,)
    back = to_torch(td)
    assert isinstance(back.get("u"), UnbatchedTensor)
    assert isinstance(back["n"].get("u"), UnbatchedTensor)
    td.unlock_().set("u", jnp.ones(4))
    assert not isinstance(to_torch(td).get("u"), UnbatchedTensor)


def test_vmap_leaves_an_unbatched_leaf_alone_when_told():
    """in_axes is a tree of axes, None for what is not batched; the batch size is right inside."""
    ad = unbatched()
    axes = ad.map(lambda _: 0).replace({"u": None, ("n", "u"): None})

    def row(part: ArrayDict) -> Any:
        assert (part.batch_size, part["u"].shape) == ((), (5,))
        return part["x"] + part["u"].sum()

    found = jax.vmap(row, in_axes=(axes,))(ad)
    expected = zoo.unbatched()["x"].numpy() + zoo.as_numpy(zoo.unbatched().get("u")).sum()
    np.testing.assert_array_equal(found, expected)


def test_a_tree_of_unbatched_leaves_alone_keeps_its_batch_size():
    """With no leaf to tell it, the batch size is kept, and follows an index."""
    td = TensorDict({"u": UnbatchedTensor(torch.ones(5)), "n": {}}, [4, 2])
    ad = to_jax(td)
    assert (ad.batch_size, ad[1].batch_size, ad[1]["n"].batch_size) == ((4, 2), (2,), (2,))
    assert to_torch(ad[1]).get("u").batch_size == torch.Size([2])


# --- values per element


def per_element(tree: Any) -> Any:
    """The values at `v` and at `n`, `w`, as plain lists."""
    return as_lists([tree["v"], tree["n", "w"]])


def as_lists(value: Any) -> Any:
    return [as_lists(part) for part in value] if isinstance(value, list) else value


def valued(start: str = "a") -> TensorDict:
    """Batch [2, 3]: values of types without a hash, and deeper ones in a nested tree."""
    rows = [[[start, i, j] if j else {"k": start} for j in range(3)] for i in range(2)]
    deep = [[[f"{start}{i}{j}{k}" for k in range(2)] for j in range(3)] for i in range(2)]
    inner = TensorDict({"y": torch.zeros(2, 3, 2), "w": stack_of(deep, 3)}, [2, 3, 2])
    td = TensorDict({"x": torch.zeros(2, 3, 4), "s": "one", "n": inner}, [2, 3])
    return td.set("v", stack_of(rows, 2))


def stack_of(values: Any, depth: int) -> Any:
    if depth == 0:
        return NonTensorData(values)
    return NonTensorStack(*[stack_of(part, depth - 1) for part in values])


INDICES: dict[str, Any] = {
    "integer": 1,
    "negative": -1,
    "both": (1, 2),
    "slice": slice(1, None),
    "step": (slice(None), slice(None, None, 2)),
    "none": (None, 0),
    "ellipsis": (..., 1),
    "list": (slice(None), [2, 0]),
    "pairs": ([0, 1, 1], [0, 2, 0]),
    "matrix": np.array([[0, 1], [1, 1]]),
    "mask": np.array([True, False]),
    "full mask": np.array([[True, False, True], [False, True, False]]),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_values_are_indexed_as_in_torch(index: Any):
    """What stays of the values per element is what torch leaves, in its order."""

    def as_torch(item: Any) -> Any:
        return torch.from_numpy(item) if isinstance(item, np.ndarray) else item

    expected = valued()[as_torch(index)]
    found = to_jax(valued())[index]
    assert found.batch_size == tuple(expected.batch_size)
    assert per_element(found) == per_element(expected)
    assert (found["s"], expected["s"]) == ("one", "one")
    assert zoo.described(to_torch(found)) == zoo.described(expected)


JOINS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "reshape": (lambda td: td.reshape(3, 2), lambda ad: ad.reshape(3, 2)),
    "flat": (lambda td: td.reshape(-1), lambda ad: ad.reshape(-1)),
    "stack": (
        lambda td: torch.stack([td, valued("b")]),
        lambda ad: ArrayDict.stack([ad, to_jax(valued("b"))]),
    ),
    "stack last": (
        lambda td: torch.stack([td, valued("b")], 2),
        lambda ad: ArrayDict.stack([ad, to_jax(valued("b"))], 2),
    ),
    "cat": (
        lambda td: torch.cat([td, valued("b")], 1),
        lambda ad: ArrayDict.cat([ad, to_jax(valued("b"))], 1),
    ),
}


@pytest.mark.parametrize("join", JOINS)
def test_values_are_joined_as_in_torch(join: str):
    """reshape, stack and cat move the values per element as torch does."""
    in_torch, there = JOINS[join]
    expected, found = in_torch(valued()), there(to_jax(valued()))
    assert found.batch_size == tuple(expected.batch_size)
    assert per_element(found) == per_element(expected)
    assert per_element(to_torch(found)) == per_element(expected)


def test_values_are_joined_with_one_value_for_all():
    """Where one tree has a value per element and the other one for all, each element gets it."""
    each = TensorDict({"v": NonTensorStack("a", "b"), "x": torch.zeros(2)}, [2])
    one = TensorDict({"v": "c", "x": torch.zeros(2)}, [2])
    for a, b in ((each, one), (one, each)):
        found = ArrayDict.cat([to_jax(a), to_jax(b)])
        expected: Any = torch.cat([a, b])
        assert list(found["v"]) == list(expected["v"])


def test_a_row_and_its_neighbour_are_values_again():
    """A tree indexed to its elements has one value in each, as torch has."""
    ad = to_jax(zoo.values_per_element())
    assert [repr(ad[i]["n", "v"]) for i in range(4)] == [
        "[1, 2]", "{'k': 1}", "array([0, 1, 2])", "None",
    ]  # fmt: skip
    assert to_torch(ad[1])["n", "v"] == {"k": 1}


def test_a_traced_index_cannot_choose_a_value():
    """Which value stays is not known while JAX traces: the error names the key and a way out."""
    ad = to_jax(zoo.values_per_element())
    message = r"'v' has a non-tensor value per element, which no traced index can choose from"
    for pick in (lambda i: ad[i], lambda i: ad[i[None]]):
        with pytest.raises(IndexError, match=message):
            jax.jit(lambda i, pick=pick: pick(i)["x"])(1)
    assert jax.jit(lambda i: ad.exclude(("n", "v"))[i]["x"])(1) == 2


@pytest.mark.parametrize("join", [ArrayDict.stack, ArrayDict.cat])
def test_one_value_that_differs_is_not_joined(join: Any):
    """Beside values per element, which may differ, an entry that is one value may not."""
    ad = to_jax(valued())
    with pytest.raises(ValueError, match="non-tensor entries differ"):
        join([ad, ad.replace(s="two")])
    with pytest.raises(ValueError, match="non-tensor entries differ"):
        join([ad, ad.exclude("v")])


def test_no_value_is_lost_where_the_static_half_cannot_follow():
    """vmap and map change shapes alone: the values stay whole, and fit again afterwards."""
    ad = to_jax(zoo.values_per_element())
    inside = []
    out = jax.vmap(lambda row: inside.append(row["n", "v"]) or row)(ad)
    assert repr(inside) == repr([ad["n", "v"]])
    assert zoo.described(to_torch(out)) == zoo.described(zoo.values_per_element())
    halved = ad.map(lambda leaf: leaf[:2])
    assert repr(to_torch(halved)["n", "v"]) == repr(ad["n", "v"])
    assert to_torch(halved).batch_size == torch.Size([2])


def test_values_of_an_empty_batch_are_still_there():
    """An index that leaves no element leaves no value, and a join brings others back."""
    ad = to_jax(zoo.values_per_element())
    empty = ad[:0]
    assert (empty.batch_size, empty["n", "v"]) == ((0,), [])
    assert repr(ArrayDict.cat([empty, ad])["n", "v"]) == repr(ad["n", "v"])


def test_values_per_element_are_hashed_and_compared():
    """Trees with equal values are of one structure, others are not; one trace for all equal."""
    traces = []
    count = jax.jit(lambda tree: traces.append(1) or tree["x"])
    for _ in range(2):
        count(to_jax(zoo.values_per_element()))
    assert len(traces) == 1
    other = to_jax(zoo.values_per_element())[np.array([1, 0, 2, 3])]
    assert jax.tree.structure(other) != jax.tree.structure(to_jax(zoo.values_per_element()))
