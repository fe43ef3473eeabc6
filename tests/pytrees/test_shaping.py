"""reshape, stack and cat over the batch dimensions: stock TensorDict is the oracle."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import tdbridge
from tdbridge import ArrayDict, NarrowingError
from tests import zoo
from tests.pytrees.trees import arrays


def tree(*size: int, start: int = 0) -> Any:
    """Leaves of several event ranks, a nested tree with no leaf, and a deeper one."""
    names = ["a", "b", "c"][: len(size)]
    td = TensorDict({"n": {"e": {}}}, size, names=names)
    td["x"] = zoo.pattern("int32", *size) + start
    td["n", "y"] = zoo.pattern("int32", *size, 2) + start
    td["deeper"] = TensorDict({"z": zoo.pattern("int32", *size, 5) + start}, [*size, 5])
    return td


def check(ours: ArrayDict, stock: Any) -> None:
    """The values and batch sizes of stock at every node, its names at the root."""
    expected = zoo.leaves(stock)
    assert set(ours.keys(True, True)) == {path if path[1:] else path[0] for path in expected}
    for path, tensor in expected.items():
        assert zoo.same_bits(np.asarray(ours[path]), tensor.contiguous().numpy()), path
    for path, node in zoo.nodes(stock).items():
        assert (ours[path] if path else ours).batch_size == tuple(node.batch_size), path
    assert ours.names == stock.names


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        ((2, 3), (3, 2)),
        ((2, 3), (6,)),
        ((2, 3), (-1,)),
        ((2, 3), (1, -1, 2)),
        ((6,), (2, 3)),
        ((), (1, 1)),
        ((1, 1), ()),
        ((2, 0), (0, 7)),
    ],
)
def test_reshape_changes_the_batch_alone(size, shape):
    """The batch dimensions take the new shape, in C order; event dimensions stay."""
    check(tdbridge.to_jax(tree(*size)).reshape(*shape), tree(*size).reshape(*shape))


@pytest.mark.parametrize("shape", [(3, 2), [3, 2], torch.Size([3, 2]), (3, -1)])
def test_a_shape_is_given_as_one_sequence_or_as_numbers(shape):
    """reshape((3, 2)) is reshape(3, 2)."""
    ad = tdbridge.to_jax(tree(2, 3))
    assert ad.reshape(shape).batch_size == ad.reshape(*shape).batch_size == (3, 2)


def test_reshape_to_the_same_shape_keeps_the_names():
    """What changes nothing loses nothing, as in stock."""
    check(tdbridge.to_jax(tree(2, 3)).reshape(2, 3), tree(2, 3).reshape(2, 3))


@pytest.mark.parametrize("shape", [(4,), (2, 2), (-1, 4), (7, -1)])
def test_a_shape_of_another_size_is_refused(shape):
    """A ValueError, as numpy raises it."""
    with pytest.raises(ValueError, match="reshape"):
        tdbridge.to_jax(tree(2, 3)).reshape(*shape)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_stack_adds_a_batch_dimension(dim):
    """Along any dimension, front or back; the new one has no name."""
    stock = [tree(2, 3), tree(2, 3, start=100), tree(2, 3, start=200)]
    ours = ArrayDict.stack([tdbridge.to_jax(td) for td in stock], dim)
    check(ours, torch.stack(stock, dim))


@pytest.mark.parametrize(("dim", "other"), [(0, (1, 3)), (1, (2, 5)), (-1, (2, 0)), (-2, (4, 3))])
def test_cat_joins_along_a_batch_dimension(dim, other):
    """Sizes may differ along the dimension; names stay."""
    stock = [tree(2, 3), tree(*other, start=100), tree(2, 3, start=200)]
    ours = ArrayDict.cat([tdbridge.to_jax(td) for td in stock], dim)
    check(ours, torch.cat(stock, dim))


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_row_of_a_stack_is_the_tree_again(name):
    """stack(trees, dim) indexed along dim gives each tree back, bit by bit, in its definition."""
    ad = arrays(name).map(np.asarray)
    for dim in range(ad.batch_dims + 1):
        stacked = ArrayDict.stack([ad, ad], dim)
        row = stacked[(slice(None),) * dim + (1,)]
        assert jax.tree.structure(row) == jax.tree.structure(ad)
        pairs = zip(jax.tree.leaves(row), jax.tree.leaves(ad), strict=True)
        assert all(zoo.same_bits(np.asarray(a), np.asarray(b)) for a, b in pairs)


@given(size=st.lists(st.integers(0, 3), min_size=1, max_size=3), data=st.data())
def test_splitting_and_cat_are_inverse(size, data):
    """Cutting a tree along a batch dimension and joining the parts gives the tree."""
    leaf = np.arange(np.prod([*size, 2])).reshape([*size, 2])
    ad = ArrayDict({"x": leaf, "n": {"y": leaf[..., 0]}}, size)
    dim = data.draw(st.integers(0, len(size) - 1))
    cut = data.draw(st.integers(0, size[dim]))
    before = (slice(None),) * dim
    joined = ArrayDict.cat([ad[(*before, slice(0, cut))], ad[(*before, slice(cut, None))]], dim)
    assert joined.batch_size == tuple(size)
    np.testing.assert_array_equal(joined["x"], leaf)
    np.testing.assert_array_equal(joined["n", "y"], leaf[..., 0])


@pytest.mark.parametrize("join", [ArrayDict.stack, ArrayDict.cat])
def test_numpy_trees_keep_64_bits(join):
    """Joining trees of numpy arrays loses no value while x64 is off."""
    leaf = np.array([2**40, -(2**41)])
    joined = join([ArrayDict({"x": leaf}, [2])] * 2)
    expected = {ArrayDict.stack: np.stack, ArrayDict.cat: np.concatenate}[join]([leaf, leaf])
    np.testing.assert_array_equal(joined["x"], expected, strict=True)


def test_class_and_non_tensor_entries_are_kept():
    """A stack of tensorclasses is one, with their common non-tensor values."""
    ad = tdbridge.to_jax(zoo.tensorclass())
    for joined in (ArrayDict.stack([ad, ad]), ArrayDict.cat([ad, ad]), ad.reshape(2, 1)):
        assert joined.tensorclass is joined["after"].tensorclass is zoo.Step
        assert (joined.label, joined.after.label) == ("now", "after")


def test_shaping_is_traceable():
    """All three run inside jit."""

    def shape(a: ArrayDict, b: ArrayDict) -> Sequence[ArrayDict]:
        return ArrayDict.stack([a, b], 1), ArrayDict.cat([a, b], 1), a.reshape(-1)

    stock = tree(2, 3), tree(2, 3, start=100)
    stacked, joined, flat = jax.jit(shape)(*map(tdbridge.to_jax, stock))
    check(stacked, torch.stack(stock, 1))
    check(joined, torch.cat(stock, 1))
    check(flat, stock[0].reshape(-1))


AD = ArrayDict({"x": jnp.zeros((2, 3)), "s": "one"}, [2])
FLAT = ArrayDict({"y": jnp.zeros(2)}, [2])


@pytest.mark.parametrize(
    ("join", "message"),
    [
        (lambda: ArrayDict.stack([]), "at least one tree, got none"),
        (lambda: ArrayDict.cat([]), "at least one tree, got none"),
        (lambda: ArrayDict.stack([AD, AD[:1]]), "one batch size, got [(1,), (2,)]"),
        (lambda: ArrayDict.stack([AD, AD], 2), "got dim 2, which is no batch dimension"),
        (lambda: ArrayDict.stack([AD, AD], -3), "got dim -3"),
        (lambda: ArrayDict.cat([AD, AD], 1), "got dim 1, which is no batch dimension"),
        (lambda: ArrayDict.cat([AD, AD], -2), "got dim -2"),
        (lambda: ArrayDict.cat([AD[0], AD[0]]), "got dim 0"),
        (lambda: ArrayDict.cat([AD, AD.reshape(2, 1)]), "batch dim"),
        (lambda: ArrayDict.stack([AD, AD.replace(y=jnp.zeros(2))]), "differ in keys"),
        (lambda: ArrayDict.stack([AD, AD.replace(x=jnp.zeros(2))]), "differ in event_dims"),
        (lambda: ArrayDict.cat([FLAT, FLAT.exclude("y").replace(y={"z": FLAT["y"]})]), "'y'"),
        (
            lambda: ArrayDict.cat([AD, AD.replace(s="two")]),
            "non-tensor entries differ: {'s': 'one'}",
        ),
        (
            lambda: ArrayDict.cat([AD, AD.exclude("s")]),
            "non-tensor entries differ: {'s': 'one'}, {}",
        ),
    ],
)
def test_trees_that_do_not_fit_together_are_refused(join, message):
    """A ValueError says in what they differ, or which dimensions there are."""
    with pytest.raises(ValueError, match=re.escape(message)):
        join()


@pytest.mark.parametrize("join", [ArrayDict.stack, ArrayDict.cat])
def test_only_arraydicts_are_joined(join):
    """A TensorDict among the trees is a TypeError that names it."""
    with pytest.raises(tdbridge.LeafTypeError, match="expected ArrayDicts, got a TensorDict"):
        join([AD, TensorDict({"x": torch.zeros(2, 3)}, [2])])


@pytest.mark.parametrize("join", [ArrayDict.stack, ArrayDict.cat])
def test_any_iterable_of_trees_is_joined(join):
    """A generator is read once."""
    joined = join(tree for tree in [AD, AD])
    assert jax.tree.structure(joined) == jax.tree.structure(join([AD, AD]))


@pytest.mark.parametrize("join", [ArrayDict.stack, ArrayDict.cat])
def test_numpy_beside_jax_is_not_narrowed(join):
    """JAX would wrap 2**40 to 0 when it joins a numpy leaf with one of its own: an error."""
    wide = ArrayDict({"a": np.array([2**40])}, [1])
    narrow = ArrayDict({"a": jnp.array([1])}, [1])
    with pytest.raises(NarrowingError, match="a numpy leaf of int64 beside a jax array"):
        join([wide, narrow])
    with pytest.raises(NarrowingError, match="a numpy leaf of int64 beside a jax array"):
        _ = wide == ArrayDict({"a": jnp.array([0])}, [1])
    with jax.enable_x64(True):
        narrow = ArrayDict({"a": jnp.array([1])}, [1])
        assert np.asarray(join([wide, narrow])["a"]).ravel().tolist() == [2**40, 1]
