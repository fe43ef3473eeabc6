"""to_jax: which trees it takes, and what becomes of their nodes and leaves."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from tdbridge import ArrayDict, to_jax
from tests import zoo
from tests.convert.trees import address, pairs, x64_for


class Pair(NamedTuple):
    left: Any
    right: Any


Untyped = namedtuple("Untyped", ["one", "two"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    value: Any
    note: Any


class Opaque:
    """A class that no registry knows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def arraydicts(tree: ArrayDict, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], ArrayDict]:
    found = {path: tree}
    for key, value in tree.items():
        if isinstance(value, ArrayDict):
            found.update(arraydicts(value, (*path, key)))
    return found


@pytest.mark.parametrize("name", zoo.TREES)
def test_every_node_keeps_class_batch_size_and_names(name: str):
    """Each TensorDict or tensorclass becomes an ArrayDict with its class, batch size and names."""
    td = zoo.TREES[name]()
    with x64_for(name):
        ad = to_jax(td)
    nodes = zoo.nodes(td)
    found = arraydicts(ad)
    assert found.keys() == nodes.keys()
    for path, node in nodes.items():
        assert found[path].tensorclass is type(node)
        assert found[path].batch_size == tuple(node.batch_size)
        assert found[path].names == list(node.names)


@pytest.mark.parametrize("name", zoo.TREES)
def test_every_leaf_keeps_its_bits(name: str):
    """Each tensor becomes a jax array of its dtype and shape, equal in every bit."""
    td = zoo.TREES[name]()
    with x64_for(name):
        ad = to_jax(td)
    keys = ad.keys(include_nested=True, leaves_only=True)
    assert {(k,) if isinstance(k, str) else k for k in keys} == zoo.leaves(td).keys()
    for path, values in zoo.expected(name).items():
        assert isinstance(ad[path], jax.Array)
        assert zoo.same_bits(np.asarray(ad[path]), values)


def test_non_tensor_values_are_the_same_objects():
    """A non-tensor entry is neither converted nor copied, at any depth."""
    inside, array = {"k": [1, 2.5, None]}, np.arange(3)
    td = TensorDict({"x": torch.ones(2), "s": "text", "n": {"y": torch.ones(2)}}, [2])
    td["d"] = NonTensorData(inside, batch_size=[2])
    td["n", "array"] = NonTensorData(array, batch_size=[2])
    ad = to_jax({"td": td, "step": zoo.tensorclass()})
    assert ad["td"]["s"] == "text"
    assert ad["td"]["d"] is inside
    assert ad["td"]["n", "array"] is array
    assert (ad["step"].label, ad["step"].after.label) == ("now", "after")
    assert ad["step"].weight is None


def test_any_pytree_keeps_its_shape():
    """Dicts, lists, tuples, namedtuples and registered dataclasses stay what they are."""
    ones = torch.ones(2)
    tree = {
        "list": [ones, [ones]],
        "tuple": (ones, ()),
        "pair": Pair(ones, Untyped(ones, None)),
        "ordered": OrderedDict(z=ones, a=ones),
        "default": defaultdict(list, k=ones),
        "dataclass": Registered(ones, ones),
        "empty": {},
    }
    got = to_jax(tree)
    expected = jax.tree.map(lambda _: 0, tree)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert list(got["ordered"]) == ["z", "a"]
    assert got["default"].default_factory is list
    leaves = jax.tree.leaves(got)
    assert len(leaves) == 10
    assert all(isinstance(leaf, jax.Array) and leaf.shape == (2,) for leaf in leaves)


@pytest.mark.parametrize(
    "leaf",
    [
        None,
        7,
        2.5,
        True,
        "text",
        b"bytes",
        1j,
        torch.float32,
        torch.Size([2]),
        Opaque(torch.ones(1)),
    ],
)
def test_what_is_no_tensor_is_left_untouched(leaf: Any):
    """None, scalars, strings and unknown objects are the same objects afterwards."""
    assert to_jax(leaf) is leaf
    got = to_jax({"leaf": leaf, "x": [leaf, torch.ones(1)]})
    assert got["leaf"] is leaf
    assert next(iter(got["x"])) is leaf


def test_a_non_tensor_entry_outside_of_a_tensordict_keeps_its_value():
    """A NonTensorData in a list is a leaf that is no tensor: its value is not lost."""
    (got,) = to_jax([NonTensorData("hello")])
    assert getattr(got, "data", got) == "hello"


def test_jax_arrays_and_arraydicts_stay_as_they_are():
    """What is JAX's already is handed on, the same objects, without a copy."""
    array, ad = jnp.arange(3.0), ArrayDict({"x": jnp.ones(2)}, [2])
    got = to_jax({"a": array, "ad": ad, "t": torch.ones(1)}, copy=True)
    assert got["a"] is array
    assert got["ad"]["x"] is ad["x"]
    assert got["ad"].batch_size == (2,)


def test_optax_state_over_torch_parameters_converts():
    """The state of an optimizer is a pytree: its arrays stay and its tensors cross."""
    state = optax.adam(1e-3).init({"w": jnp.ones(3)})
    torch_state = jax.tree.map(lambda leaf: torch.from_numpy(np.array(leaf)), state)
    got = to_jax(torch_state)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
        assert zoo.same_bits(np.asarray(ours), np.asarray(theirs))


def test_tensordicts_inside_pytrees_become_arraydicts():
    """A TensorDict or tensorclass at any depth of a pytree is converted as a tree of its own."""
    got = to_jax({"a": [zoo.nested(), (zoo.tensorclass(),)], "t": torch.arange(2.0)})
    assert isinstance(got["a"][0], ArrayDict)
    assert got["a"][0].names == ["time"]
    assert got["a"][1][0].tensorclass is zoo.Step
    assert got["a"][1][0].after.label == "after"


def test_leaves_are_detached():
    """Parameters and tensors that require gradients cross; torch's graph is left alone."""
    weight = torch.nn.Parameter(torch.arange(3.0))
    result = (weight * 2).clone()
    tree = {"p": weight, "r": result, "b": torch.nn.Buffer(torch.ones(3))}
    got = to_jax(tree)
    assert got["p"].tolist() == [0, 1, 2]
    assert got["r"].tolist() == [0, 2, 4]
    assert weight.requires_grad
    assert result.grad_fn is not None
    result.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2, 2]


def test_tied_leaves_share_one_memory():
    """One tensor under two keys becomes two arrays over the same memory."""
    tied = torch.arange(4.0)
    got = to_jax(TensorDict({"a": tied, "n": {"b": tied}}, [4]), copy=False)
    assert address(got["a"]) == address(got["n", "b"]) == address(tied)


def test_a_jax_array_that_tensordict_took_for_a_non_tensor_is_a_leaf():
    """Arrays of JAX and of bfloat16, which tensordict wraps as NonTensorData, are leaves."""
    td = TensorDict({"x": torch.ones(2)}, [2])
    td["j"] = jnp.arange(2.0)
    td["b"] = np.arange(2).astype(jnp.bfloat16)
    got = to_jax(td)
    assert isinstance(got["j"], jax.Array)
    assert isinstance(got["b"], jax.Array)
    assert got["b"].dtype == jnp.bfloat16
    assert got.batch_size == (2,)


def test_a_wrapped_array_of_another_batch_size_is_refused():
    """A leaf that does not start with the batch size is named: the batch size is not lost."""
    td = TensorDict({"x": torch.ones(2)}, [2])
    td["d"] = NonTensorData(jnp.zeros(5), batch_size=[2])
    with pytest.raises(TypeError, match=r"\['d'\]"):
        to_jax(td)


def test_a_tree_built_inside_jit_converts():
    """to_jax works while JAX traces: tensors become constants and tracers stay."""
    td = TensorDict({"x": torch.arange(3.0), "p": torch.arange(6.0).reshape(3, 2).t()})

    def f(v):
        ad = to_jax({"td": td, "v": v})
        return ad["td"]["x"] * 2.0 + ad["v"], ad["td"]["p"] + 1.0

    a, b = jax.jit(f)(jnp.ones(3))
    assert a.tolist() == [1, 3, 5]
    assert b.tolist() == [[1, 3, 5], [2, 4, 6]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"copy": "yes"}, "copy is None, True or False, got 'yes'."),
        ({"copy": 0}, "copy is None, True or False, got 0."),
        ({"copy": 1}, "copy is None, True or False, got 1."),
        ({"packed": "yes"}, "packed is True or False, got 'yes'."),
        ({"narrow": "maybe"}, 'narrow is "exact", "allow" or "never", got \'maybe\'.'),
        ({"device": "cpu", "sharding": "x"}, "pass `device` or `sharding`, not both."),
        ({"copy": False, "device": "cpu"}, "it goes with no device or sharding."),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str):
    """An argument outside of its values raises ValueError, also for an empty tree."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
        to_jax({}, **arguments)
    assert message in str(error.value)


def test_the_pairs_of_the_other_tests_are_not_empty():
    """The helper that the pointer tests iterate with sees every leaf."""
    td = zoo.nested()
    assert [path for path, _, _ in pairs(td, to_jax(td))] == [
        ("obs",), ("next", "reward"), ("next", "done"), ("deep", "er", "est")
    ]  # fmt: skip
