"""Trees that are no dict of tensors of one batch cross, and come back as what they were."""

from collections.abc import Callable
from io import BytesIO
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    PersistentTensorDict,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    lazy_stack,
)

import tdbridge
import tdbridge._compat.tensordict as compat
from tdbridge import ArrayDict, LeafTypeError, PRNGKey, consolidate, to_jax, to_torch
from tests import zoo
from tests.convert.trees import address, listed

KEYS = ["", "a.b", "a/b", "ключ", "size", "leaves", "cls", "stack_dim", "0", "values", "offsets"]


@pytest.mark.parametrize("name", zoo.KINDS)
def test_a_kind_comes_back_as_it_was(name: str):
    """Classes, keys, batch sizes, names, non-tensor values and bits are the same."""
    found = to_torch(to_jax(zoo.KINDS[name]()))
    assert zoo.described(found) == zoo.described(zoo.KINDS[name]())


def test_kinds_come_back_from_inside_a_pytree():
    """The same in a dict, a list and a tuple, with None and a number beside them."""
    trees = {name: ([make(), None], 3) for name, make in zoo.KINDS.items()}
    found = to_torch(to_jax(trees))
    assert found.keys() == zoo.KINDS.keys()
    for name, ((part, none), number) in found.items():
        assert (none, number) == (None, 3)
        assert zoo.described(part) == zoo.described(zoo.KINDS[name]())


@pytest.mark.parametrize("name", [name for name in zoo.KINDS if name != "jagged_transposed"])
def test_the_memory_is_shared_both_ways(name: str):
    """With x64 on, which keeps offsets as they are, nothing at all is copied."""
    tree = zoo.KINDS[name]().clone()  # numpy, where some come from, aligns to 16 bytes
    with jax.enable_x64(True):
        arrays = to_jax(tree, copy=False)
        back = to_torch(arrays, copy=False)
        twice = to_jax(back, copy=False)
    first, second = (
        sorted(address(leaf) for leaf in jax.tree.leaves(ad)) for ad in (arrays, twice)
    )
    assert first == second
    assert zoo.described(back) == zoo.described(tree)


def test_kinds_come_back_through_public_constructors(monkeypatch: pytest.MonkeyPatch):
    """Where tensordict lacks the constructor that checks nothing, the trees are the same."""
    monkeypatch.setattr(compat, "_HAS_NEW_UNSAFE", False)
    for make in zoo.KINDS.values():
        assert zoo.described(to_torch(to_jax(make()))) == zoo.described(make())


def odd(make: Callable[[], Any]) -> dict[str, Any]:
    return {key: make() for key in KEYS}


ODD: dict[str, Callable[[], Any]] = {
    "lazy": lambda: LazyStackedTensorDict(
        *[TensorDict(odd(lambda: zoo.pattern("float32", 2)), [2])] * 2
    ),
    "lazy stacks": lambda: TensorDict(odd(zoo.lazy)),
    "values": lambda: TensorDict(odd(lambda: NonTensorStack("a", "b")), [2]),
    "unbatched": lambda: TensorDict(odd(lambda: UnbatchedTensor(zoo.pattern("int8", 3))), [2]),
    "jagged": lambda: TensorDict(odd(lambda: zoo.jagged()["j"]), [2]),
    "params": lambda: TensorDictParams(
        TensorDict({key.replace(".", ""): zoo.pattern("float32", 2) for key in KEYS}),
        no_convert=True,
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_keys_are_the_users(kind: str):
    """Empty, dotted and slashed keys, and those that a node has for itself, name nothing else."""
    assert zoo.described(to_torch(to_jax(ODD[kind]()))) == zoo.described(ODD[kind]())


# --- each kind


def test_members_of_a_lazy_stack_may_have_other_names():
    """torch gives such a stack no names; each member keeps its own, in every form of the tree."""
    members = [TensorDict({"x": torch.ones(2)}, [2], names=[name]) for name in ("a", "b")]
    stack = LazyStackedTensorDict(*members)
    masks = jax.tree.map(lambda _: True, stack)
    for found in (
        to_torch(to_jax(stack)),
        consolidate(stack),
        jax.tree.map(lambda _, leaf: leaf, masks, stack),
    ):
        assert [member.names for member in found.tensordicts] == [["a"], ["b"]]


def test_a_stored_tensordict_is_read_into_memory():
    """A PersistentTensorDict crosses by value, and comes back as a TensorDict."""
    td = zoo.nested()
    stored = PersistentTensorDict.from_dict(td, filename=BytesIO())
    ad = to_jax({"h5": stored})["h5"]
    assert isinstance(ad, ArrayDict)
    assert zoo.described(to_torch(ad)) == zoo.described(td)
    assert stored["obs"].tolist() == td["obs"].tolist()


def test_a_parameter_comes_back_as_a_plain_tensor():
    """Parameters are detached: TensorDictParams(td) makes them Parameters again."""
    back = to_torch(to_jax(zoo.params()))
    assert type(back) is TensorDictParams
    assert type(back["w"]) is torch.Tensor
    assert not back["w"].requires_grad
    assert isinstance(TensorDictParams(back.data)["w"], torch.nn.Parameter)


def test_the_parameters_of_a_module_go_back_into_it():
    """What was converted and changed in JAX is what the module then computes with."""
    net = torch.nn.Linear(2, 3)
    doubled = to_jax(TensorDict.from_module(net)).map(lambda leaf: leaf * 2)
    expected = 2 * net(torch.ones(2)).detach().numpy()
    with torch.no_grad(), to_torch(doubled).to_module(net):
        np.testing.assert_allclose(net(torch.ones(2)).numpy(), expected, rtol=1e-6)


def test_jagged_tensors_that_share_offsets_still_do():
    """torch multiplies two jagged tensors when their offsets are one object, narrowed or not."""
    j = zoo.jagged()["j"]
    td = TensorDict({"j": j, "k": j * 2, "n": {"m": j + 1}}, [2])
    for x64 in (False, True):
        with jax.enable_x64(x64):
            back: Any = to_torch(to_jax(td))
        product = back["j"] * back["k"] + back["n", "m"]
        expected = [row * row * 2 + row + 1 for row in map(zoo.as_numpy, j.unbind())]
        for row, values in zip(product.unbind(), expected, strict=True):
            np.testing.assert_array_equal(row.numpy(), values)


def test_a_jagged_tensor_crosses_outside_of_a_tensordict():
    """It is a node of its values and offsets, and detached."""
    rows = [torch.ones(2), torch.zeros(3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
    (ad,) = to_jax([jagged])
    assert (ad["values"].tolist(), ad["offsets"].tolist()) == ([1, 1, 0, 0, 0], [0, 2, 5])
    (back,) = to_torch([ad])
    assert [row.tolist() for row in back.unbind()] == [[1, 1], [0, 0, 0]]
    assert not back.requires_grad


def test_an_unbatched_leaf_stays_whole():
    """Its shape does not start with the batch size on either side."""
    ad = to_jax(zoo.unbatched())
    assert (ad.batch_size, ad["u"].shape, ad["n", "u"].shape) == ((4,), (5,), (2, 2))
    back = to_torch(ad[:3])
    assert isinstance(back.get("u"), UnbatchedTensor)
    assert (back.batch_size, back.get("u").shape) == (torch.Size([3]), torch.Size([5]))


def test_an_unbatched_tensor_alone_is_a_tensor():
    """Outside of a TensorDict there is no batch that it could stand apart from."""
    back = to_torch(to_jax({"u": UnbatchedTensor(torch.arange(3.0))}))
    assert type(back["u"]) is torch.Tensor
    assert back["u"].tolist() == [0, 1, 2]


def test_an_empty_stack_of_values_keeps_its_place():
    """Values per element of an empty batch are an entry still, of no value."""
    back = to_torch(to_jax(zoo.values_per_element()[:0]))
    assert back["n", "v"] == []
    assert back.batch_size == torch.Size([0])


def test_a_jagged_tensor_without_values_is_refused_by_its_parts():
    """What a part of it cannot do is said of that part."""
    rows = [torch.ones(2), torch.zeros(3)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged, device="meta")
    with pytest.raises(LeafTypeError) as error:
        to_jax(TensorDict({"n": {"j": jagged}}, [2]))
    assert list(listed(error.value)) == ["['n', 'j', 'values']", "['n', 'j', 'offsets']"]


# --- PRNG keys


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_prng_key_comes_back_as_the_same_key(impl: str):
    """Typed keys cross as their data and the name of their algorithm."""
    key = jax.random.key(7, impl=impl)
    tree = {"one": key, "many": ArrayDict({"k": jax.random.split(key, 3)}, [3])}
    torch_side = to_torch(tree)
    assert isinstance(torch_side["one"], PRNGKey)
    assert torch_side["one"].key_data.tolist() == np.asarray(jax.random.key_data(key)).tolist()
    assert (torch_side["one"].impl, torch_side["many"].get("k").batch_size) == (impl, (3,))
    back = to_jax(torch_side)
    assert back["one"].dtype == back["many"]["k"].dtype == key.dtype
    assert jax.random.bits(back["one"]) == jax.random.bits(key)
    assert jnp.array_equal(
        jax.random.key_data(back["many"]["k"]), jax.random.key_data(tree["many"]["k"])
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda keys: keys[1], lambda keys: keys[1]),
        (lambda keys: torch.stack([keys[0], keys[2]]), lambda keys: keys[np.array([0, 2])]),
        (lambda keys: torch.cat([keys, keys]), lambda keys: jnp.concatenate([keys, keys])),
        (lambda keys: keys.reshape(3, 1), lambda keys: keys.reshape(3, 1)),
    ],
    ids=["index", "stack", "cat", "reshape"],
)
def test_keys_can_be_moved_in_torch(change: Any, expected: Any):
    """A PRNGKey is indexed, stacked, joined and reshaped like any tensorclass."""
    keys = jax.random.split(jax.random.key(0), 3)
    found, wanted = to_jax(change(to_torch(keys))), expected(keys)
    assert found.shape == wanted.shape
    assert jnp.array_equal(jax.random.key_data(found), jax.random.key_data(wanted))


def test_keys_of_two_algorithms_are_no_array():
    """A stack of them is refused by its path; as a list they cross."""
    data = torch.zeros(2, dtype=torch.uint32)
    keys: list[Any] = [PRNGKey(key_data=data, impl=impl) for impl in ("a", "b")]
    with pytest.raises(LeafTypeError, match=r"^\['k'\]: got PRNG keys of 2 algorithms, \['a', 'b'"):
        to_jax({"k": torch.stack(keys)})


def test_keys_are_explained():
    """A key is a leaf that is shared."""
    (row,) = tdbridge.explain({"k": jax.random.key(0)}, to="torch").rows
    assert (row.dtype, row.nbytes, row.fate) == ("key<fry>", 8, "shared")


def test_members_of_a_lazy_stack_may_hold_keys():
    """A lazy stack of PRNGKeys is one of arrays of keys in JAX, and comes back."""
    keys = [to_torch(jax.random.key(i)) for i in range(2)]
    back = to_torch(to_jax(lazy_stack(keys)))
    assert type(back) is PRNGKey
    assert [k.key_data.tolist() for k in back.unbind(0)] == [k.key_data.tolist() for k in keys]


# --- tied leaves


def tied_state() -> dict[str, torch.Tensor]:
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    net["b"].weight = net["a"].weight
    return net.state_dict()


@pytest.mark.parametrize("beside", [{}, {"z": np.arange(3)}], ids=["alone", "beside numpy"])
def test_tied_weights_stay_one(beside: dict[str, Any]):
    """Two names of one weight are one array, one tensor, and are copied once."""
    for copy in (None, True):
        arrays = to_jax({**tied_state(), **beside}, copy=copy)
        assert arrays["a.weight"] is arrays["b.weight"]
        assert arrays["a.bias"] is not arrays["b.bias"]
    back = to_torch(arrays)
    assert back["a.weight"] is back["b.weight"]


def test_views_that_differ_are_not_tied():
    """Two views of one memory that start alike, and differ in shape, stride or dtype, are two."""
    base = torch.arange(4.0)
    tree = [base, base.view(2, 2), base.view(2, 2).t(), base.view(torch.int32), base[:2], base]
    arrays = to_jax(tree)
    assert arrays[0] is arrays[5]
    for array, tensor in zip(arrays, tree, strict=True):
        np.testing.assert_array_equal(np.asarray(array), tensor.numpy(), strict=True)


def test_an_error_names_each_of_the_tied():
    """All paths of a leaf that cannot cross are listed."""
    bad = torch.ones(2, device="meta")
    with pytest.raises(LeafTypeError) as error:
        to_jax({"a": bad, "b": [bad], "ok": torch.ones(1)})
    assert list(listed(error.value)) == ["['a']", "['b', '0']"]


def test_jax_refuses_to_donate_a_tied_leaf():
    """One buffer cannot be donated twice; JAX says so."""
    arrays = to_jax(tied_state())
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
    with pytest.raises(Exception, match="donate the same buffer twice"):
        jax.block_until_ready(step(arrays))


# --- one value per element


def test_one_value_that_fits_no_batch_is_not_lost():
    """After a map to other shapes the values are kept whole, as one value."""
    ad = to_jax(zoo.values_per_element())
    found = to_torch(ad.map(lambda leaf: leaf.reshape(2, 2)))
    assert found.batch_size == torch.Size([2, 2])
    assert isinstance(found["n"].get("v"), NonTensorData)
    assert repr(found["n", "v"]) == repr([[1, 2], {"k": 1}, np.arange(3), None])


def test_parts_that_make_no_node_any_more_are_named():
    """A stack of jagged tensors and a PRNG key in an unbatched place are refused by their paths."""
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    ad = to_jax(TensorDict({"n": {"r": ragged}, "u": UnbatchedTensor(torch.ones(3))}))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), ad)
    with pytest.raises(LeafTypeError, match=r"^\['n', 'r'\]: got parts that make no NestedTensor"):
        to_torch(stacked)
    with pytest.raises(
        LeafTypeError, match=r"^\['u'\]: got a PRNGKey in the place of an unbatched"
    ):
        to_torch(ad.replace(u=jax.random.key(0)))


@pytest.mark.parametrize(
    "change",
    [lambda key: key.float(), lambda key: key.apply(lambda data: data[:1])],
    ids=["cast", "cut"],
)
def test_what_is_no_key_any_more_is_named(change: Any):
    """PRNG keys whose data JAX does not take are refused by their path, with its own words."""
    td = TensorDict({"n": {"key": change(to_torch({"k": jax.random.key(0)})["k"])}})
    with pytest.raises(LeafTypeError, match=r"^\['n', 'key'\]: got a PRNGKey .*: .*key.data"):
        to_jax(td)
