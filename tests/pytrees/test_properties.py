"""Laws for any tree: random keys, depths, batch and event shapes, non-tensor values and names."""

import pickle
from typing import Any

import jax
import numpy as np
import optree
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict
from torch import Tensor

import tdbridge
from tdbridge import ArrayDict
from tests.pytrees.trees import nodes

KEYS = st.text("abcdef.", min_size=1, max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.int32, torch.bool, torch.bfloat16, torch.complex64])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
SIZES = st.lists(st.integers(0, 3), max_size=2)


@st.composite
def tensordicts(draw: st.DrawFn, size: tuple[int, ...] | None = None, depth: int = 2) -> TensorDict:
    """A TensorDict of at most three levels."""
    if size is None:
        size = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    names = draw(st.none() | st.just([f"dim{i}" for i in range(len(size))]))
    td = TensorDict({}, size)
    for key in draw(st.lists(KEYS, max_size=4, unique=True)):
        kind = draw(st.sampled_from(["leaf", "leaf", "value", "tree", "deeper"]))
        if kind == "leaf":
            shape = (*size, *draw(SIZES))
            numbers = torch.arange(int(np.prod(shape))).reshape(shape)
            td[key] = numbers.to(draw(DTYPES))
        elif kind == "value":
            td[key] = NonTensorData(draw(VALUES), batch_size=size)
        elif depth:
            inner = (*size, *draw(SIZES)) if kind == "deeper" else size
            td[key] = draw(tensordicts(inner, depth - 1))
    if names is not None:
        td.names = names
    return td


def facts(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Batch size, names, non-tensor values and identities of the leaves, by path."""
    found: dict[tuple[str, ...], Any] = {path: (tuple(tree.batch_size), list(tree.names or []))}
    for key in tree.keys():  # noqa: SIM118 - a TensorDict
        value = tree[key] if isinstance(tree, ArrayDict) else tree.get(key)
        if isinstance(value, (TensorDict, ArrayDict)):
            found.update(facts(value, (*path, key)))
        else:
            data = value.data if isinstance(value, NonTensorData) else value
            is_leaf = isinstance(data, (Tensor, jax.Array))
            found[(*path, key)] = id(data) if is_leaf else repr(data)
    return found


@given(tensordicts())
def test_flatten_and_unflatten_are_inverse(td):
    """For any tree, as a TensorDict and as an ArrayDict, in JAX and in optree."""
    for tree in (td, tdbridge.to_jax(td)):
        for flatten, unflatten in (
            (jax.tree.flatten, jax.tree.unflatten),
            (optree.tree_flatten, optree.tree_unflatten),
        ):
            leaves, definition = flatten(tree)
            back = unflatten(definition, leaves)
            assert facts(back) == facts(tree)
            assert flatten(back)[1] == definition


@given(tensordicts(), st.sampled_from([True, object(), 3, "text"]))
def test_masks_keep_the_definition(td, value):
    """Any leaf can take the place of any other."""
    for tree in (td, tdbridge.to_jax(td)):
        mask = jax.tree.map(lambda _: value, tree)
        assert jax.tree.structure(mask) == jax.tree.structure(tree)
        assert all(leaf is value for leaf in jax.tree.leaves(mask))
        restored = jax.tree.map(lambda _, leaf: leaf, mask, tree)
        assert jax.tree.structure(restored) == jax.tree.structure(tree)


@given(tensordicts())
def test_a_tree_and_its_pickle_have_one_definition(td):
    """So that a batch that came out of another process costs no new trace."""
    for tree in (td, tdbridge.to_jax(td)):
        again = pickle.loads(pickle.dumps(tree))
        assert jax.tree.structure(again) == jax.tree.structure(tree)
        assert hash(jax.tree.structure(again).node_data()) == hash(
            jax.tree.structure(tree).node_data()
        )


@given(tensordicts())
def test_both_kinds_have_the_same_facts(td):
    """An ArrayDict has the paths, batch sizes, names and non-tensor values of its TensorDict."""
    ours, stock = facts(tdbridge.to_jax(td)), facts(td)
    assert ours.keys() == stock.keys()
    assert {k: v for k, v in ours.items() if not isinstance(v, int)} == {
        k: v for k, v in stock.items() if not isinstance(v, int)
    }


@given(tensordicts(), st.data())
def test_exclude_is_what_select_leaves(td, data):
    """select and exclude share the entries out: together they make the tree again."""
    ad = tdbridge.to_jax(td)
    some = data.draw(st.lists(st.sampled_from(list(ad.keys())), unique=True)) if len(ad) else []
    kept, rest = ad.select(*some), ad.exclude(*some)
    assert set(kept.keys()) == set(some)
    assert set(rest.keys()) == set(ad.keys()) - set(some)
    assert facts(kept | rest) == facts(ad)


@given(tensordicts())
def test_flattened_keys_are_the_paths(td):
    """flatten_keys joins each path; every leaf is there once, the same object."""
    ad = tdbridge.to_jax(td)
    flat = ad.flatten_keys("/")
    expected = {
        "/".join(key) if isinstance(key, tuple) else key: ad[key] for key in ad.keys(True, True)
    }
    assert set(flat.keys(leaves_only=True)) == set(expected)
    assert all(flat[key] is leaf for key, leaf in expected.items())


@given(tensordicts())
def test_one_leading_dimension_more_or_less_keeps_the_definition(td):
    """Whatever vmap, scan and stack do to the leaves, every batch size follows."""
    ad = tdbridge.to_jax(td)
    more = ad.map(lambda leaf: np.broadcast_to(np.asarray(leaf), (5, *leaf.shape)))
    assert jax.tree.structure(more) == jax.tree.structure(ad)
    with_leaf = {path for path, node in nodes(ad).items() if jax.tree.leaves(node)}
    for path, node in nodes(more).items():
        old = nodes(ad)[path].batch_size
        parents_have_leaf = any(path[:depth] in with_leaf for depth in range(len(path) + 1))
        assert node.batch_size == ((5, *old) if parents_have_leaf else old)
    less = more.map(lambda leaf: leaf[0])
    assert jax.tree.structure(less) == jax.tree.structure(ad)
    assert {p: n.batch_size for p, n in nodes(less).items()} == {
        p: n.batch_size for p, n in nodes(ad).items()
    }
