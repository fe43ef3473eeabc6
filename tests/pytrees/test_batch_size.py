"""The batch size inside and after transformations: derived from the leaves, never carried along."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from tensordict import TensorDict

import tdbridge
from tdbridge import ArrayDict
from tests import zoo
from tests.pytrees.trees import STRUCTURES, arrays, jax_tensordict

MESH = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("data", "model"))
SIZE = (4, 2, 6)


def tensordict() -> TensorDict:
    """Leaves of several ranks, a deeper nested batch, and nested trees without leaves."""
    td = TensorDict({"x": zoo.pattern("float32", *SIZE, 3)}, SIZE, names=["a", "b", "c"])
    td["n"] = TensorDict({"y": zoo.pattern("float32", *SIZE), "e": {"e": {}}}, SIZE)
    td["deeper"] = TensorDict({"z": zoo.pattern("float32", *SIZE, 5, 1), "e": {}}, [*SIZE, 5])
    return td


KINDS: dict[str, Any] = {
    "arraydict": tdbridge.to_jax(tensordict()),
    "tensordict": jax.tree.map(lambda t: jnp.asarray(t.numpy()), tensordict()),
}
each_kind = pytest.mark.parametrize("tree", KINDS.values(), ids=KINDS)


def sizes(tree: Any) -> dict[str, tuple[int, ...]]:
    paths = {"root": (), "n": ("n",), "empty": ("n", "e"), "inner": ("n", "e", "e")}
    paths |= {"deeper": ("deeper",), "deeper empty": ("deeper", "e")}
    return {name: tuple((tree[path] if path else tree).batch_size) for name, path in paths.items()}


def expected(*size: int) -> dict[str, tuple[int, ...]]:
    plain = dict.fromkeys(("root", "n", "empty", "inner"), size)
    return {**plain, "deeper": (*size, 5), "deeper empty": (*size, 5)}


@each_kind
@pytest.mark.parametrize(("axis", "inside"), [(0, (2, 6)), (1, (4, 6)), (2, (4, 2))])
def test_vmap_takes_any_batch_dimension_away_and_puts_it_back(tree, axis, inside):
    """Inside vmap the mapped dimension is gone at every node; out_axes puts it where it says."""
    seen = []

    def look(row: Any) -> Any:
        seen.append((sizes(row), list(row.names)))
        return row

    result = jax.vmap(look, in_axes=axis, out_axes=axis)(tree)
    assert seen == [(expected(*inside), [None, None])]
    assert sizes(result) == expected(*SIZE)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    moved = jax.vmap(look, in_axes=axis, out_axes=0)(tree)
    assert sizes(moved) == expected(SIZE[axis], *inside)


@each_kind
@given(axes=st.permutations([0, 1, 2]), outs=st.permutations([0, 1, 2]))
def test_nested_vmap_takes_one_dimension_per_level(tree, axes, outs):
    """Three nested vmaps over three batch dimensions, in any order, reach a tree with none left."""
    left, right = list(axes), [min(out, depth) for depth, out in enumerate(outs)]
    in_axes = [axis - sum(other < axis for other in left[:i]) for i, axis in enumerate(left)]
    seen = []

    def look(row: Any) -> Any:
        seen.append((sizes(row), len(row.names)))
        return row

    function = look
    for in_axis, out_axis in zip(reversed(in_axes), right, strict=True):
        function = jax.vmap(function, in_axes=in_axis, out_axes=out_axis)
    result = jax.eval_shape(function, tree)
    assert seen == [(expected(), 0)]
    assert sizes(result) == expected(*result["x"].shape[:3])


@each_kind
def test_scan_gives_rows_and_stacks_them(tree):
    """scan hands out rows of the first batch dimension, and stacks what comes out."""
    seen = []

    def step(carry: Any, row: Any) -> Any:
        seen.append((sizes(carry), sizes(row)))
        return carry, row

    carry, rows = jax.lax.scan(step, tree, tree)
    assert seen[0] == (expected(*SIZE), expected(*SIZE[1:]))
    assert sizes(carry) == sizes(rows) == expected(*SIZE)
    assert list(rows.names) == ["a", "b", "c"]


@each_kind
def test_shard_map_sees_the_local_batch(tree):
    """Inside shard_map the batch size is that of the shard; outside it is whole again."""
    seen = []

    def look(shard: Any) -> Any:
        seen.append((sizes(shard), list(shard.names)))
        return shard

    spec = PartitionSpec("data", "model")
    result = jax.shard_map(look, mesh=MESH, in_specs=spec, out_specs=spec)(tree)
    assert seen[0] == (expected(1, 1, 6), ["a", "b", "c"])
    assert sizes(result) == expected(*SIZE)
    assert list(result.names) == ["a", "b", "c"]


@each_kind
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_stacking_leaf_by_leaf_adds_a_batch_dimension(tree, axis):
    """jax.tree.map(stack) on trees gives a tree of one more batch dimension, at every node."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis), tree, tree, tree)
    assert sizes(stacked) == expected(*SIZE[:axis], 3, *SIZE[axis:])


@each_kind
def test_a_reduction_over_the_batch_leaves_the_event_dimensions(tree):
    """Mapping a mean over leading dimensions takes them out of the batch size."""
    assert sizes(jax.tree.map(lambda x: x.mean(0), tree)) == expected(2, 6)
    assert sizes(jax.tree.map(lambda x: x.mean((0, 1, 2)), tree)) == expected()


@each_kind
def test_partly_mapped_trees_share_the_dimensions_that_all_leaves_have(tree):
    """With in_axes 0 for some leaves and None for others, the batch is what all leaves share."""
    axes = jax.tree.map(lambda x: 0 if x.ndim > 3 else None, tree)
    seen = []
    jax.vmap(lambda row: seen.append((row["x"].shape, row["n", "y"].shape, tuple(row.batch_size))),
             in_axes=(axes,))(tree)  # fmt: skip
    assert seen == [((2, 6, 3), (4, 2, 6), ())]


def test_what_is_built_inside_gets_the_mapped_dimension_outside():
    """A tree made, replaced or selected inside vmap comes out with the whole batch size."""
    ad = KINDS["arraydict"]

    def work(row: ArrayDict) -> Any:
        new = ArrayDict({"s": row["x"].sum(-1), "n": {"e": {}}}, row.batch_size)
        return new, row.replace(z=row["x"] * 2, q={"e": {}}), row.select("n"), row.exclude("n")

    new, replaced, selected, excluded = jax.vmap(work)(ad)
    assert new.batch_size == new["n", "e"].batch_size == SIZE
    assert (
        replaced.batch_size
        == replaced["q", "e"].batch_size
        == replaced["n", "e"].batch_size
        == SIZE
    )
    assert selected.batch_size == excluded.batch_size == SIZE
    assert replaced.names == ["a", "b", "c"]


@pytest.mark.parametrize("loop", ["scan", "while", "cond"])
def test_control_flow_inside_vmap_may_replace_entries(loop):
    """A carry or a branch that replaces an entry keeps the structure, names or no names."""
    ad = KINDS["arraydict"]

    def twice(tree: ArrayDict) -> ArrayDict:
        return tree.replace(x=tree["x"] * 2)

    loops = {
        "scan": lambda row: jax.lax.scan(lambda c, _: (twice(c), None), row, length=1)[0],
        "while": lambda row: jax.lax.while_loop(
            lambda c: c["x"].sum() <= row["x"].sum(), twice, row
        ),
        "cond": lambda row: jax.lax.cond(row["x"].sum() > 0, twice, lambda c: c, row),
    }
    result = jax.vmap(loops[loop])(ad)
    np.testing.assert_array_equal(result["x"], np.asarray(ad["x"]) * 2)
    assert jax.tree.structure(result) == jax.tree.structure(ad)


MAPPABLE = [name for name in STRUCTURES if zoo.expected(name) and 0 not in zoo.TREES[name]().shape]


@pytest.mark.parametrize("make", [arrays, jax_tensordict])
@pytest.mark.parametrize("name", [name for name in MAPPABLE if zoo.TREES[name]().batch_dims])
def test_vmap_of_the_identity_is_the_identity(name, make):
    """Whatever the structure: vmap with nothing to do gives class, definition and size back."""
    tree = make(name)
    result = jax.vmap(lambda row: row)(tree)
    assert type(result) is type(tree)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    assert result.batch_size == tree.batch_size


def test_a_tree_without_leaves_keeps_its_batch_size():
    """With no leaf to tell it, the batch size is the one that was given."""
    for tree in (ArrayDict({"e": {}}, [3, 2]), TensorDict({"e": {}}, [3, 2])):
        result = jax.jit(lambda tree: tree)(tree)
        assert tuple(result.batch_size) == tuple(result["e"].batch_size) == (3, 2)
