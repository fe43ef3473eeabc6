"""TensorDict, its kin and ArrayDict as pytrees of JAX: the laws, over the whole zoo."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.utils._pytree as torch_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path
from tensordict import NonTensorData, TensorDict

import tdbridge
from tdbridge import ArrayDict
from tests import zoo
from tests.pytrees.trees import STRUCTURES, arrays, both, constants

ALL = list(zoo.TREES)
MESH = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("data", "model"))
KINDS = {"tensordict": lambda name: zoo.TREES[name](), "arraydict": arrays}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
each_tree = pytest.mark.parametrize("name", ALL)
each_structure = pytest.mark.parametrize("name", STRUCTURES)


@each_tree
def test_leaves_are_the_tensors_sorted_by_path(name):
    """The leaves are the very tensors of the tree, in the order of their paths."""
    td = zoo.TREES[name]()
    expected = zoo.leaves(td)
    found = {keystr(path): leaf for path, leaf in tree_leaves_with_path(td)}
    assert list(found) == ["".join(f"[{key!r}]" for key in path) for path in sorted(expected)]
    pairs = zip(found.values(), [expected[path] for path in sorted(expected)], strict=True)
    assert all(a is b for a, b in pairs)


@each_structure
def test_both_kinds_have_the_same_key_paths(name):
    """A TensorDict and its ArrayDict twin name their leaves alike."""
    a, b = (tree_leaves_with_path(make(name)) for make in KINDS.values())
    assert [path for path, _ in a] == [path for path, _ in b]


@each_tree
def test_unflatten_undoes_flatten(name):
    """The tree that comes back has the class, keys, sizes, names and values of the first."""
    td = zoo.TREES[name]()
    leaves, definition = jax.tree.flatten(td)
    back = jax.tree.unflatten(definition, leaves)
    assert jax.tree.structure(back) == definition
    assert zoo.nodes(back).keys() == zoo.nodes(td).keys()
    for path, node in zoo.nodes(td).items():
        again = zoo.nodes(back)[path]
        assert type(again) is type(node)
        assert set(again.keys()) == set(node.keys())
        assert again.batch_size == node.batch_size
        assert again.names == node.names
        assert not again.is_locked
        np.testing.assert_equal(constants(again), constants(node))
    assert all(zoo.leaves(back)[path] is leaf for path, leaf in zoo.leaves(td).items())


@each_structure
def test_an_arraydict_comes_back_as_it_was(name):
    """unflatten(flatten(ad)) has the leaves of ad and its definition, twice over."""
    ad = arrays(name)
    leaves, definition = jax.tree.flatten(ad)
    back = jax.tree.unflatten(definition, leaves)
    assert type(back) is ArrayDict
    assert back.batch_size == ad.batch_size
    again, definition_again = jax.tree.flatten(back)
    assert definition_again == definition
    assert all(a is b for a, b in zip(again, leaves, strict=True))


OTHER_LEAVES = {
    "true": lambda x: True,
    "int": lambda x: 3,
    "object": lambda x: object(),
    "text": lambda x: "text",
    "struct": lambda x: jax.ShapeDtypeStruct(tuple(x.shape), jnp.float32),
    "spec": lambda x: PartitionSpec("data"),
    "sharding": lambda x: NamedSharding(MESH, PartitionSpec()),
    "numpy": lambda x: np.zeros(tuple(x.shape), np.int8),
    "scalar": lambda x: np.zeros((), np.int8),
    "batched": lambda x: np.zeros((2, *x.shape), np.int8),
    "reduced": lambda x: np.zeros(tuple(x.shape[1:]), np.int8),
    "none": lambda x: None,
    "shape": lambda x: tuple(x.shape),
    "pair": lambda x: [x, x],
}
IS_LEAF = {
    "none": lambda x: x is None,
    "shape": lambda x: isinstance(x, tuple),
    "pair": lambda x: isinstance(x, list),
}


@each_structure
def test_the_definition_does_not_depend_on_the_leaves(name):
    """Masks, None, shapes, shardings and objects in the leaves' places keep the definition."""
    for tree in both(name):
        for kind, other in OTHER_LEAVES.items():
            is_leaf = IS_LEAF.get(kind)
            mapped = jax.tree.map(other, tree)
            assert type(mapped) is type(tree), kind
            assert jax.tree.structure(mapped, is_leaf=is_leaf) == jax.tree.structure(tree), kind
            again = jax.tree.map(lambda x: x, mapped, is_leaf=is_leaf)
            assert jax.tree.structure(again, is_leaf=is_leaf) == jax.tree.structure(tree), kind


@each_structure
def test_a_tree_and_its_mask_are_mapped_together(name):
    """jax.tree.map(f, tree, other) pairs each leaf with what stands in its place."""
    for tree in both(name):
        for kind, leaf in OTHER_LEAVES.items():
            is_leaf, other = IS_LEAF.get(kind), jax.tree.map(leaf, tree)
            pairs = jax.tree.map(lambda a, b: [a, b], tree, other, is_leaf=is_leaf)
            assert type(pairs) is type(tree), kind
            found = jax.tree.leaves(pairs, is_leaf=lambda x: isinstance(x, list))
            leaves = jax.tree.leaves(tree), jax.tree.leaves(other, is_leaf=is_leaf)
            expected = zip(*leaves, strict=True)
            assert all(a is x and b is y for (a, b), (x, y) in zip(found, expected, strict=True)), (
                kind
            )


@pytest.mark.parametrize("change", [torch.sum, torch.flatten, lambda t: t[None]])
@pytest.mark.parametrize("name", ["flat", "nested", "deeper_batch", "tensorclass", "no_batch"])
def test_tensors_of_other_ranks_keep_the_definition_too(name, change):
    """A norm per leaf, a flattened or a batched leaf are mapped with the tree all the same."""
    td = zoo.TREES[name]()
    mapped = jax.tree.map(change, td)
    assert jax.tree.structure(mapped) == jax.tree.structure(td)
    assert jax.tree.structure(jax.tree.map(lambda a, b: a, td, mapped)) == jax.tree.structure(td)


@pytest.mark.parametrize("name", [n for n in STRUCTURES if zoo.leaves(zoo.TREES[n]())])
def test_a_tree_of_other_leaves_is_locked(name):
    """tensordict's own checks do not know such leaves, so nothing can be put beside them."""
    for kind, other in OTHER_LEAVES.items():
        mapped = jax.tree.map(other, zoo.TREES[name]())
        assert mapped.is_locked, kind
        with pytest.raises(RuntimeError, match="lock"):
            mapped.set(next(iter(mapped.keys())), torch.zeros(mapped.batch_size))


@each_structure
def test_tensors_stay_in_an_ordinary_tensordict(name):
    """Mapping tensors to tensors gives an unlocked tree of the same class with their values."""
    td = zoo.TREES[name]()
    result = jax.tree.map(lambda t: t.clone(), td)
    assert type(result) is type(td)
    assert not result.is_locked
    assert result.batch_size == td.batch_size
    for path, leaf in zoo.leaves(td).items():
        assert zoo.leaves(result)[path] is not leaf
        assert zoo.same_bits(zoo.as_numpy(zoo.leaves(result)[path]), zoo.as_numpy(leaf))


def with_arrays() -> TensorDict:
    return jax.tree.map(lambda t: jnp.asarray(t.numpy()), zoo.nested())


@pytest.mark.parametrize(
    "change",
    [
        lambda td: td.set("obs", torch.ones(4)),
        lambda td: td.set("new", torch.ones(4)),
        lambda td: td.pop("obs"),
        lambda td: setattr(td, "names", ["other"]),
        lambda td: setattr(td, "batch_size", []),
    ],
)
def test_a_changed_tree_is_described_anew(change):
    """What a locked tree remembers ends where it is unlocked and changed, also if locked again."""
    td = with_arrays()
    td.unlock_()
    change(td)
    td.lock_()
    back = jax.tree.map(lambda x: x, td)
    assert set(back.keys(True, True)) == set(td.keys(True, True))
    assert back.batch_size == td.batch_size
    assert back.names == td.names
    assert jax.tree.structure(back) == jax.tree.structure(td)


def test_a_tree_of_jax_arrays_reads_as_a_tensordict():
    """Keys, nested access and indexing work on a TensorDict that holds jax arrays."""
    td = with_arrays()
    assert isinstance(td["next", "reward"], jax.Array)
    row = td[1]
    assert row.batch_size == ()
    np.testing.assert_array_equal(row["obs"], zoo.expected("nested")[("obs",)][1])
    ad = tdbridge.to_jax(td)
    assert ad["obs"] is td["obs"]
    assert ad.names == ["time"]


@pytest.mark.parametrize("value", [jnp.arange(8).reshape(4, 2), np.ones(4, jnp.bfloat16)])
def test_an_array_that_tensordict_took_for_a_non_tensor_is_a_leaf(value):
    """tensordict makes NonTensorData of a jax or bfloat16 array; in the pytree it is a leaf."""
    td = TensorDict({"x": torch.zeros(4)}, [4])
    td["j"] = value
    assert isinstance(td.get("j"), NonTensorData)
    assert [keystr(path) for path, _ in tree_leaves_with_path(td)] == ["['j']", "['x']"]
    assert jax.tree.leaves(td)[0] is value
    back = jax.tree.map(lambda x: x, td)
    assert back["j"] is value
    assert back.batch_size == (4,)
    assert jax.tree.structure(back) == jax.tree.structure(td)


@pytest.mark.parametrize("value", [jnp.arange(3), jnp.float32(0.5)])
def test_such_an_array_has_to_start_with_the_batch_size(value):
    """tensordict did not check its shape: an array of another batch is refused, by its path."""
    td = TensorDict({"n": {"x": torch.zeros(4)}}, [4])
    td["n", "j"] = value
    message = r"'j'\]: got an array of shape .* start with the batch size \[4\]"
    for convert in (jax.tree.leaves, tdbridge.to_jax):
        with pytest.raises(tdbridge.LeafTypeError, match=message):
            convert(td)


@each_kind
def test_key_paths_read_as_the_user_wrote_the_keys(make):
    """Paths in JAX's errors are `['next']['reward']`."""
    tree = make("nested")
    paths = tree_map_with_path(lambda path, _: keystr(path), tree)
    assert paths["next", "reward"] == "['next']['reward']"
    with pytest.raises(TypeError, match=r"at path \w+\['next'\]\['reward'\]"):
        jax.jit(lambda tree: tree)(
            jax.tree.map(lambda _: object(), tree.select(("next", "reward")))
        )
    with pytest.raises(ValueError, match=r"tree\['next'\]"):
        jax.tree.map(lambda a, b: a, tree, tree.exclude(("next", "reward")))


@each_structure
def test_transpose_turns_a_tree_of_pairs_into_a_pair_of_trees(name):
    """jax.tree.transpose takes the tree as the outer structure, and as the inner one."""
    tree = arrays(name)
    outer, inner = jax.tree.structure(tree), jax.tree.structure([0, 0])
    if tree.keys(True, True):
        pair = jax.tree.transpose(outer, inner, jax.tree.map(lambda x: [x, x], tree))
        assert [jax.tree.structure(half) for half in pair] == [outer, outer]
        back = jax.tree.transpose(inner, outer, pair)
        assert jax.tree.structure(back, is_leaf=lambda x: isinstance(x, list)) == outer


@each_structure
def test_torchs_own_pytrees_are_not_disturbed(name):
    """torch.utils._pytree flattens and rebuilds a tree as tensordict taught it to."""
    td = zoo.TREES[name]()
    leaves, spec = torch_pytree.tree_flatten(td)
    back = torch_pytree.tree_unflatten(leaves, spec)
    assert type(back) is type(td)
    assert back.batch_size == td.batch_size
    assert all(isinstance(leaf, (torch.Tensor, TensorDict, NonTensorData)) for leaf in leaves)


def test_a_memory_mapped_tree_is_a_pytree(tmp_path):
    """A TensorDict of memory-mapped tensors has those very tensors as leaves."""
    td = zoo.flat().memmap(str(tmp_path))
    assert [leaf is td[key] for key, leaf in zip("ab", jax.tree.leaves(td), strict=True)] == [
        True
    ] * 2
    doubled: Any = jax.tree.map(lambda t: t * 2, td)
    np.testing.assert_array_equal(doubled["b"], zoo.flat()["b"].numpy() * 2)
