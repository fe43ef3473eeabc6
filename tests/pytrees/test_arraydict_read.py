"""Reading an ArrayDict: the words of TensorDict, with stock TensorDict as the oracle."""

import copy
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdbridge
from tdbridge import ArrayDict
from tests import zoo
from tests.pytrees.trees import STRUCTURES, arrays, constants, nodes

ALL = list(zoo.TREES)
AD = ArrayDict(
    {
        "obs": jnp.arange(12.0).reshape(4, 3),
        "next": {"reward": jnp.arange(4.0), "done": jnp.zeros((4, 1), bool)},
        "label": "text",
    },
    [4],
    names=["time"],
)


def as_path(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


BOOLS = [(a, b) for a in (False, True) for b in (False, True)]


@pytest.mark.parametrize("name", ALL)
def test_keys_are_those_of_the_tensordict(name):
    """keys(include_nested, leaves_only) names what stock names, each key once."""
    ad, stock = arrays(name), zoo.TREES[name]()
    for which in BOOLS:
        ours = list(ad.keys(*which))
        assert len(ours) == len(set(ours)), which
        assert set(ours) == set(stock.keys(*which)), which


@pytest.mark.parametrize("name", STRUCTURES)
def test_keys_are_sorted(name):
    """The order depends on the keys alone; the keys of a nested tree follow the tree's own key."""
    ours = [as_path(key) for key in arrays(name).keys(include_nested=True)]
    assert ours == sorted(ours)


@pytest.mark.parametrize("name", STRUCTURES)
def test_items_values_and_keys_agree(name):
    """items() pairs each key with what the tree gives for that key, and values() is its half."""
    ad = arrays(name)
    for include_nested, leaves_only in BOOLS:
        items = ad.items(include_nested, leaves_only)
        assert [key for key, _ in items] == list(ad.keys(include_nested, leaves_only))
        assert all(ad[key] is value for key, value in items)
        values = ad.values(include_nested, leaves_only)
        assert all(a is b for a, (_, b) in zip(values, items, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_leaves_have_the_values_of_the_tensordict(name):
    """Each leaf, read by its tuple key, has the bits of its tensor."""
    ad = arrays(name)
    expected = zoo.expected(name)
    assert {as_path(key) for key in ad.keys(True, True)} == set(expected)
    assert [p for p, v in expected.items() if not zoo.same_bits(np.asarray(ad[p]), v)] == []


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_node_has_the_batch_size_names_and_class_of_the_tensordict(name):
    """batch_size, shape, batch_dims, ndim, names and the class agree with stock at every node."""
    ours = nodes(arrays(name))
    stock = zoo.nodes(zoo.TREES[name]())
    assert ours.keys() == stock.keys()
    for path, td in stock.items():
        ad = ours[path]
        assert ad.batch_size == tuple(td.batch_size) == ad.shape
        assert ad.batch_dims == td.batch_dims == ad.ndim
        assert ad.names == td.names
        assert ad.tensorclass is type(td)


@pytest.mark.parametrize("name", STRUCTURES)
def test_non_tensor_entries_are_entries_and_no_leaves(name):
    """A non-tensor value is read by its key as it was put in, and is not among the leaves."""
    stock = zoo.nodes(zoo.TREES[name]())
    for path, ad in nodes(arrays(name)).items():
        for key, value in constants(stock[path]).items():
            np.testing.assert_equal(ad[key], value)
            assert key in ad
            assert key not in ad.keys(leaves_only=True)


def test_it_is_a_mapping_over_its_keys():
    """len, iteration, dict() and ** go over the keys, as for any Mapping."""
    assert isinstance(AD, Mapping)
    assert len(AD) == 3
    assert list(AD) == ["label", "next", "obs"] == list(dict(AD)) == list({**AD})
    match AD:
        case {"obs": found}:
            assert found is AD["obs"]
    assert len(ArrayDict()) == 0


def test_tuple_keys_reach_into_nested_trees():
    """ad["a", "b"] is ad["a"]["b"]; a tuple of one key is that key."""
    assert AD["next", "reward"] is AD["next"]["reward"]
    assert AD[("obs",)] is AD["obs"]
    assert AD.get(("next", "reward")) is AD["next"]["reward"]


@pytest.mark.parametrize(
    ("key", "there"),
    [
        ("obs", True),
        ("label", True),
        ("next", True),
        (("next", "done"), True),
        (("obs",), True),
        ("done", False),
        (("next", "obs"), False),
        (("obs", "x"), False),
        (("label", "x"), False),
        (3, False),
        ((), False),
        (("next", 3), False),
    ],
)
def test_in_and_get_say_whether_an_entry_is_there(key, there):
    """`in` is true and get() gives the entry for its key or tuple of keys, and for nothing else."""
    missing = object()
    assert (key in AD) is there
    assert (AD.get(key, missing) is not missing) is there
    assert there or AD.get(key) is None


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("zz", "'zz' is not among the keys ['label', 'next', 'obs']"),
        (("next", "zz"), "'zz' is not among the keys ['done', 'reward']"),
        (("obs", "x"), "['obs'] is a leaf and has no key 'x'"),
        (("next", "done", "x"), "['next', 'done'] is a leaf and has no key 'x'"),
    ],
)
def test_a_missing_key_is_a_key_error_that_tells_what_there_is(key, message):
    """The error names the key, and the keys that could have been meant."""
    with pytest.raises(KeyError, match=re.escape(message)):
        AD[key]


def test_to_dict_gives_plain_dicts_of_the_same_objects():
    """to_dict() nests plain dicts and copies no leaf."""
    plain = AD.to_dict()
    assert type(plain) is dict
    assert type(plain["next"]) is dict
    assert plain["label"] == "text"
    assert plain["obs"] is AD["obs"]
    assert plain["next"]["reward"] is AD["next", "reward"]


def test_fields_of_a_tensorclass_are_attributes():
    """Attributes read the fields at every level; a field that is not set reads None."""
    ad = arrays("tensorclass")
    assert ad.obs is ad["obs"]
    assert ad.label == "now"
    assert ad.after.label == "after"
    assert ad.after.obs is ad["after", "obs"]
    assert ad.weight is None
    assert ad.after.after is None
    assert ad[0].after.obs.shape == (3,)


@pytest.mark.parametrize("ad", [AD, arrays("tensorclass")])
def test_what_is_no_field_is_no_attribute(ad):
    """Any other attribute is an AttributeError that tells how keys are read."""
    message = "ArrayDict has no attribute 'nothing': read entries by ad['nothing'], change them"
    with pytest.raises(AttributeError, match=re.escape(message)):
        ad.nothing  # noqa: B018
    assert not hasattr(ad, "_nothing")


def test_keys_of_a_tensordict_are_no_attributes():
    """Only a tensorclass has attributes for its entries."""
    assert not hasattr(AD, "obs")


@pytest.mark.parametrize("make", [np.zeros, jnp.zeros, lambda s: jax.ShapeDtypeStruct(s, "int8")])
def test_leaves_are_kept_as_they_are(make):
    """The constructor copies and converts no numpy array, jax array or ShapeDtypeStruct."""
    leaf = make((2, 3))
    assert ArrayDict({"x": leaf}, [2])["x"] is leaf
    assert ArrayDict({"n": {"x": leaf}}, [2])["n", "x"] is leaf


def test_python_numbers_become_arrays():
    """bool, int, float and complex are scalars of JAX's default dtypes."""
    ad = ArrayDict({"b": True, "i": 3, "f": 0.5, "c": 1j})
    dtypes = {key: str(ad[key].dtype) for key in ad}
    assert dtypes == {"b": "bool", "i": "int32", "f": "float32", "c": "complex64"}
    assert all(isinstance(leaf, jax.Array) and leaf.shape == () for leaf in ad.values())


@pytest.mark.parametrize("value", [None, "text", [1, 2], (1, 2), b"x", {1, 2}, np.dtype("int8")])
def test_what_is_no_array_is_a_non_tensor_entry(value):
    """Anything but an array, a number and a mapping is kept beside the leaves, whatever it is."""
    ad = ArrayDict({"x": jnp.zeros((2, 3)), "value": value}, [2])
    assert ad["value"] is value
    assert list(ad.keys(leaves_only=True)) == ["x"]
    assert len(jax.tree.leaves(ad)) == 1


def test_tuple_keys_build_nested_trees():
    """A tuple key in the source is a path, as in a TensorDict."""
    leaf = jnp.zeros(2)
    source: Any = {"a": {"c": leaf}, ("a", "b"): leaf, ("d", "e", "f"): leaf}
    ad = ArrayDict(source, [2])
    assert list(ad.keys(True, True)) == [("a", "b"), ("a", "c"), ("d", "e", "f")]


def test_nested_names_and_batch_sizes_follow_the_parent():
    """A plain mapping inside takes the batch size and the names of the tree around it."""
    stock = TensorDict({"n": {"m": {"x": torch.zeros(2, 3)}}}, [2, 3], names=["a", "b"])
    ad = ArrayDict({"n": {"m": {"x": jnp.zeros((2, 3))}}}, [2, 3], names=["a", "b"])
    for path in [("n",), ("n", "m")]:
        assert ad[path].batch_size == tuple(stock[path].batch_size) == (2, 3)
        assert ad[path].names == stock[path].names == ["a", "b"]


def test_an_arraydict_inside_keeps_its_own_batch_dimensions():
    """A nested ArrayDict may have more batch dimensions than the tree around it."""
    inner = ArrayDict({"x": jnp.zeros((2, 5, 3))}, [2, 5], names=[None, "step"])
    ad = ArrayDict({"inner": inner, "y": jnp.zeros(2)}, [2])
    assert ad.batch_size == (2,)
    assert ad["inner"].batch_size == (2, 5)
    assert ad["inner"].names == [None, "step"]


def test_an_arraydict_is_a_source():
    """ArrayDict(ad, batch_size) holds the entries of ad, the very same leaves."""
    again = ArrayDict(AD, [4])
    assert list(again.keys(True)) == list(AD.keys(True))
    assert all(again[key] is AD[key] for key in AD.keys(True, True))


@pytest.mark.parametrize("size", [3, [3], (3,), np.array([3]), torch.Size([3])])
def test_a_batch_size_is_a_number_or_a_sequence(size):
    """batch_size takes an int or any sequence of ints and is a tuple."""
    assert ArrayDict({"x": jnp.zeros((3, 2))}, size).batch_size == (3,)


untyped: Any = ArrayDict


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: untyped({"n": {"x": jnp.zeros(3)}}, [2]), ValueError, "['n', 'x']: got shape"),
        (lambda: untyped({"x": jnp.zeros(())}, [2]), ValueError, "start with batch_size (2,)"),
        (lambda: untyped({"x": 1.0}, [2]), ValueError, "['x']: got shape ()"),
        (lambda: untyped({"n": {3: jnp.zeros(2)}}), ValueError, "['n']: keys are strings"),
        (lambda: untyped({("a", 1): jnp.zeros(2)}), ValueError, "got ('a', 1)"),
        (lambda: untyped({(): jnp.zeros(2)}), ValueError, "got ()"),
        (lambda: untyped({"a": 1, ("a", "b"): 1}), ValueError, "['a'] is a leaf and a tree"),
        (lambda: untyped({("a", "b"): 1, "a": {"b": 1}}), ValueError, "twice"),
        (lambda: untyped({}, [2], names=["a", "b"]), ValueError, "got 2 names for batch_size"),
        (lambda: untyped({"n": {"x": torch.zeros(2)}}), TypeError, "['n', 'x']: got a torch.T"),
        (lambda: untyped({"n": TensorDict()}), tdbridge.LeafTypeError, "tdbridge.to_jax first"),
        (lambda: untyped(TensorDict(x=torch.zeros(2))), TypeError, "tdbridge.to_jax"),
    ],
)
def test_the_constructor_refuses_what_it_cannot_hold(build, error, message):
    """The error names the path of what is wrong, what was got, and the way out."""
    with pytest.raises(error, match=re.escape(message)):
        build()


def test_a_copy_is_the_same_tree():
    """copy.copy gives an equal tree over the same leaves."""
    shallow = copy.copy(AD)
    assert all(shallow[key] is AD[key] for key in AD.keys(True, True))
    assert jax.tree.structure(shallow) == jax.tree.structure(AD)
