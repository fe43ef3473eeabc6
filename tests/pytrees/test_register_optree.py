"""TensorDict, its kin and ArrayDict as pytrees of optree's default namespace."""

import operator
from typing import Any

import jax
import numpy as np
import optree
import pytest
import torch
from tensordict import TensorDict

from tdbridge import ArrayDict
from tests import zoo
from tests.pytrees.trees import STRUCTURES, arrays, both

each_tree = pytest.mark.parametrize("name", STRUCTURES)


@each_tree
def test_leaves_paths_and_accessors_belong_together(name):
    """The leaves and their order are those of JAX; paths are tuple keys, accessors read leaves."""
    for tree in both(name):
        accessors, leaves, _ = optree.tree_flatten_with_accessor(tree)
        assert all(a is b for a, b in zip(leaves, jax.tree.leaves(tree), strict=True))
        assert optree.tree_paths(tree) == sorted(zoo.expected(name))
        assert all(a(tree) is leaf for a, leaf in zip(accessors, leaves, strict=True))


def test_an_accessor_is_written_as_the_user_reads_the_entry():
    """Keys of a TensorDict and an ArrayDict are items, fields of a tensorclass are attributes."""
    codes = {
        "tensorclass_inside": ["*['step'].after.obs", "*['step'].obs", "*['x']"],
        "flat": ["*['a']", "*['b']"],
    }
    for name, expected in codes.items():
        found = [accessor.codify("*") for accessor in optree.tree_accessors(zoo.TREES[name]())]
        assert found == expected
    assert [a.codify("*") for a in optree.tree_accessors(arrays("flat"))] == codes["flat"]


@each_tree
def test_unflatten_undoes_flatten(name):
    """The tree that comes back is of the same class and definition, over the same leaves."""
    for tree in both(name):
        leaves, definition = optree.tree_flatten(tree)
        back = optree.tree_unflatten(definition, leaves)
        assert type(back) is type(tree)
        assert back.batch_size == tree.batch_size
        assert optree.tree_structure(back) == definition
        assert all(a is b for a, b in zip(optree.tree_leaves(back), leaves, strict=True))


OTHER_LEAVES = {
    "true": lambda x: True,
    "object": lambda x: object(),
    "numpy": lambda x: np.zeros(tuple(x.shape), np.int8),
    "batched": lambda x: np.zeros((2, *x.shape), np.int8),
    "struct": lambda x: jax.ShapeDtypeStruct(tuple(x.shape), "float32"),
}


@each_tree
def test_the_definition_does_not_depend_on_the_leaves(name):
    """Other leaves keep the definition, and are mapped together with the tree."""
    for tree in both(name):
        for kind, other in OTHER_LEAVES.items():
            mapped = optree.tree_map(other, tree)
            assert optree.tree_structure(mapped) == optree.tree_structure(tree), kind
            assert type(optree.tree_map(lambda a, b: b, tree, mapped)) is type(tree), kind


@each_tree
def test_none_is_a_leaf_where_the_caller_says_so(name):
    """With none_is_leaf a tree of None has the definition of the tree it was made from."""
    for tree in both(name):
        nothing = optree.tree_map(lambda x: None, tree, none_is_leaf=True)
        expected = optree.tree_structure(tree, none_is_leaf=True)
        assert optree.tree_structure(nothing, none_is_leaf=True) == expected
        assert len(optree.tree_leaves(nothing, none_is_leaf=True)) == len(zoo.expected(name))


def test_values_are_mapped_and_reduced():
    """tree_map and tree_reduce compute what plain torch and numpy do."""
    td: Any = zoo.nested().exclude(("next", "done"))
    doubled: Any = optree.tree_map(lambda t: t * 2, td)
    assert type(doubled) is TensorDict
    for path, tensor in zoo.leaves(td).items():
        assert torch.equal(doubled[path], tensor * 2)
    ad = optree.tree_map(np.asarray, td)
    total = optree.tree_reduce(operator.add, optree.tree_map(np.sum, ad))
    assert total == sum(v.numpy().sum() for v in zoo.leaves(td).values())


def test_transpose_gives_a_tree_per_part():
    """tree_transpose turns an ArrayDict of dicts into a dict of ArrayDicts."""
    ad = arrays("nested").exclude(("next", "done"))
    pairs = optree.tree_map(lambda x: {"m": x, "v": x + x}, ad)
    inner: Any = {"m": 0, "v": 0}
    outer_def, inner_def = optree.tree_structure(ad), optree.tree_structure(inner)
    parts = optree.tree_transpose(outer_def, inner_def, pairs)
    assert list(parts) == ["m", "v"]
    assert isinstance(parts["v"], ArrayDict)
    np.testing.assert_array_equal(parts["v"]["obs"], 2 * zoo.expected("nested")["obs",])


def test_the_torch_namespace_still_works():
    """tensordict's own registration, in namespace "torch", is found as before."""
    td = zoo.flat()
    assert len(optree.tree_leaves(td, namespace="torch")) == 2
    back = optree.tree_map(lambda t: t, td, namespace="torch")
    assert type(back) is TensorDict
    assert back.batch_size == td.batch_size
