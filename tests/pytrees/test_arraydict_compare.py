"""== and != are elementwise, as on a TensorDict; .all() and .any() reduce them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tdbridge
from tdbridge import ArrayDict
from tests import zoo
from tests.pytrees.trees import STRUCTURES, arrays, nodes, values


def pair() -> tuple[TensorDict, TensorDict]:
    """Two trees that differ in some elements."""
    a = TensorDict({"x": torch.arange(6.0).reshape(3, 2), "n": {"y": torch.arange(3)}}, [3])
    b = a.clone()
    b["x"][1, 0] = -1.0
    b["n", "y"][2] = 7
    return a, b


@pytest.mark.parametrize("name", [*STRUCTURES, "all_dtypes"])
def test_a_tree_equals_itself(name):
    """ad == ad is true in every element, ad != ad in none."""
    ad = arrays(name)
    with jax.enable_x64(True):
        assert bool((ad == ad).all())
        assert not bool((ad != ad).any())


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_comparison_has_the_shape_of_the_tree(name):
    """Paths, shapes, batch sizes and classes are those of the tree; the leaves are booleans."""
    ad = arrays(name).map(np.asarray)
    same = ad == ad
    for path, leaf in values(ad).items():
        found = values(same)[path]
        assert (found.dtype, found.shape) == (np.bool_, leaf.shape)
    expected = {path: (n.batch_size, n.tensorclass) for path, n in nodes(ad).items()}
    assert {path: (n.batch_size, n.tensorclass) for path, n in nodes(same).items()} == expected


@pytest.mark.parametrize("compare", [lambda a, b: a == b, lambda a, b: a != b])
def test_elements_are_compared_as_stock_does(compare):
    """Each element of each leaf is compared with its counterpart."""
    a, b = pair()
    ours = compare(tdbridge.to_jax(a), tdbridge.to_jax(b))
    stock = compare(a, b)
    for path, expected in zoo.leaves(stock).items():
        np.testing.assert_array_equal(ours[path], zoo.as_numpy(expected))
    assert bool(ours.all()) is bool(stock.all())
    assert bool(ours.any()) is bool(stock.any())


def test_other_mappings_and_arrays_are_compared_too():
    """A mapping of arrays is taken for a tree, a number or an array is compared with every leaf."""
    ad = ArrayDict({"x": jnp.ones(2), "n": {"y": jnp.zeros((2, 1))}}, [2])
    assert bool((ad == {"x": jnp.ones(2), "n": {"y": jnp.zeros((2, 1))}}).all())
    ones = ad == jnp.float32(1)
    np.testing.assert_array_equal(ones["x"], [True, True])
    np.testing.assert_array_equal(ones["n", "y"], [[False], [False]])
    assert not bool((ad == jnp.float32(1)).all())
    assert bool((ad == jnp.float32(1)).any())


@pytest.mark.parametrize("other", [None, "text", object()])
def test_what_is_no_tree_and_no_number_is_not_equal(other):
    """Comparison with anything else is False, and != is True, as on a TensorDict."""
    ad = ArrayDict({"x": jnp.ones(2)}, [2])
    assert (TensorDict({"x": torch.ones(2)}, [2]) == None) is False  # noqa: E711 - the oracle
    assert (ad == other) is False
    assert (ad != other) is True


def test_non_tensor_entries_count():
    """Trees that differ in a non-tensor entry alone are not all equal, as on a TensorDict."""
    a = TensorDict({"x": torch.ones(2), "s": "one"}, [2])
    b = TensorDict({"x": torch.ones(2), "s": "two"}, [2])
    assert not bool((a == b).all())
    assert bool((a != b).any())
    assert bool((tdbridge.to_jax(a) == tdbridge.to_jax(a)).all())
    assert not bool((tdbridge.to_jax(a) == tdbridge.to_jax(b)).all())
    assert bool((tdbridge.to_jax(a) != tdbridge.to_jax(b)).any())


@pytest.mark.parametrize("missing", ["x", ("n", "y"), "s"])
def test_trees_of_other_keys_cannot_be_compared(missing):
    """A KeyError names what only one of the two has, also a non-tensor entry, as in stock."""
    stock = TensorDict({"x": torch.ones(2), "n": {"y": torch.ones(2)}, "s": "text"}, [2])
    with pytest.raises(KeyError):
        _ = stock == stock.exclude(missing)
    ad = tdbridge.to_jax(stock)
    with pytest.raises(KeyError, match=f"keys differ.*'{missing[-1]}'"):
        _ = ad == ad.exclude(missing)


def test_the_reductions_of_no_leaf_are_those_of_no_element():
    """all() of nothing is true and any() of nothing is false."""
    assert bool(ArrayDict({}, [3]).all()) is True
    assert bool(ArrayDict({}, [3]).any()) is False


def test_comparison_and_reduction_are_traceable():
    """(a == b).all() runs inside jit and gives an array."""
    ad = ArrayDict({"x": jnp.ones(2), "n": {"y": jnp.zeros(2)}}, [2])
    equal = jax.jit(lambda a, b: (a == b).all())
    assert equal(ad, ad).item() is True
    assert equal(ad, ad.replace(x=jnp.zeros(2))).item() is False


def test_a_tree_has_no_truth_and_no_hash():
    """bool() would be ambiguous and hash() a lie: both are TypeErrors that say what to do."""
    ad = ArrayDict({"x": jnp.ones(2)})
    with pytest.raises(TypeError, match=re.escape("use .all(), .any() or len(ad)")):
        bool(ad)
    with pytest.raises(TypeError, match="unhashable type: 'ArrayDict'"):
        hash(ad)
