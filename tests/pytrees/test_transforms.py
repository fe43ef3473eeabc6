"""JAX's transformations give on trees what they give on plain dicts of the same arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tensordict import TensorDict

import tdbridge
from tdbridge import ArrayDict
from tests import zoo
from tests.pytrees.trees import NARROW, STRUCTURES, arrays, assert_same_values, jax_tensordict

MESH = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("data", "model"))


def stock() -> TensorDict:
    td = TensorDict({"x": zoo.pattern("float32", 4, 2, 3), "s": "text"}, [4, 2], names=["t", "b"])
    td["n"] = TensorDict({"y": zoo.pattern("float32", 4, 2), "e": {}}, [4, 2])
    return td


AD = tdbridge.to_jax(stock())
TREES: dict[str, Any] = {
    "arraydict": AD,
    "tensordict": jax.tree.map(lambda t: jnp.asarray(t.numpy()), stock()),
    "tensorclass": jax.tree.map(lambda t: jnp.asarray(t.numpy()), zoo.tensorclass()),
}


def plain(tree: Any) -> Any:
    """The same arrays in nested plain dicts, so that JAX knows nothing of us."""
    if isinstance(tree, jax.Array):
        return tree
    nodes = {key: tree.get(key) for key in tree.keys()}  # noqa: SIM118 - a TensorDict
    held = (jax.Array, ArrayDict, TensorDict, zoo.Step)
    return {key: plain(value) for key, value in nodes.items() if isinstance(value, held)}


def loss(tree: Any) -> jax.Array:
    """A scalar to which every leaf contributes in another way, and not linearly."""
    terms = [((i + 1.0) * leaf**3).sum() for i, leaf in enumerate(jax.tree.leaves(tree))]
    return jnp.stack(terms).sum()


def square(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * leaf, tree)


def step(carry: Any, _: Any) -> Any:
    return square(carry), loss(carry)


ON_TREES: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit(square),
    "grad": jax.grad(loss),
    "value_and_grad": jax.value_and_grad(loss),
    "has_aux": jax.value_and_grad(lambda t: (loss(t), square(t)), has_aux=True),
    "jvp": lambda t: jax.jvp(square, (t,), (t,)),
    "vjp": lambda t: jax.vjp(square, t)[1](t),
    "checkpoint": jax.grad(jax.checkpoint(loss)),
    "vmap": jax.vmap(square),
    "vmap of grad": jax.vmap(jax.grad(loss)),
    "scan": lambda t: jax.lax.scan(step, t, None, length=2),
    "scan over rows": lambda t: jax.lax.scan(lambda c, row: (c + loss(row), square(row)), 0.0, t),
    "associative_scan": lambda t: jax.lax.associative_scan(
        lambda a, b: jax.tree.map(jnp.add, a, b), t
    ),
    "cond": lambda t: jax.lax.cond(loss(t) > 0, square, lambda t: t, t),
    "while_loop": lambda t: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, square(c[1])), (0, t)
    ),
    "masks": lambda t: jax.tree.map(jnp.where, jax.tree.map(lambda x: x > 2, t), t, square(t)),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("transform", ON_TREES.values(), ids=ON_TREES)
def test_a_transformation_gives_what_it_gives_on_plain_dicts(transform, tree):
    """The same values at the same paths, bit by bit, in trees of our class and definition."""
    found, expected = jax.jit(transform)(tree), jax.jit(transform)(plain(tree))
    assert_same_values(found, expected)
    ours = [x for x in jax.tree.leaves(found, is_leaf=is_tree) if is_tree(x)]
    assert all(type(x) is type(tree) for x in ours)
    assert all(jax.tree.structure(x) == jax.tree.structure(tree) for x in ours)
    assert all(tuple(x.batch_size) == tuple(tree.batch_size) for x in ours)


def is_tree(x: Any) -> bool:
    return isinstance(x, tuple(map(type, TREES.values())))


@pytest.mark.parametrize("jacobian", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_jacobians_nest_a_tree_in_each_leaf(tree, jacobian):
    """The Jacobian of a tree by a tree is a tree of trees, with the values of plain dicts."""
    derive = jax.jit(jacobian(square))
    found, expected = derive(tree), derive(plain(tree))
    assert_same_values(found, expected)
    assert type(found) is type(tree)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_the_hessian_is_that_of_plain_dicts(tree):
    """jax.hessian differentiates twice through the nodes."""
    derive = jax.jit(jax.hessian(loss))
    assert_same_values(derive(tree), derive(plain(tree)))


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_eval_shape_gives_a_tree_of_shapes(tree):
    """eval_shape runs the function on shapes and gives ShapeDtypeStructs in the same tree."""
    found = jax.eval_shape(square, tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for struct, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert (struct.shape, struct.dtype) == (leaf.shape, leaf.dtype)
    assert jax.tree.structure(jax.eval_shape(square, found)) == jax.tree.structure(tree)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_donated_tree_is_used_up_and_its_result_is_right(tree):
    """jit may take the memory of a donated tree; what comes out is what it should be."""
    donated = jax.tree.map(jnp.copy, tree)
    result = jax.jit(square, donate_argnums=0)(donated)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    assert_same_values(result, square(plain(tree)))


EVERY = [(arrays, name) for name in NARROW] + [(jax_tensordict, name) for name in STRUCTURES]


@pytest.mark.parametrize(("make", "name"), EVERY)
def test_jit_of_the_identity_is_the_identity(name, make):
    """Over the whole zoo: through jit, definition and every bit stay."""
    tree = make(name)
    result = jax.jit(lambda tree: tree)(tree)
    assert type(result) is type(tree)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    assert_same_values(result, tree)


@pytest.mark.parametrize("tree", [TREES["arraydict"], TREES["tensordict"]])
def test_device_put_takes_a_tree_of_shardings(tree):
    """A tree of shardings, one per leaf, made by jax.tree.map, places each leaf by its own."""
    specs = jax.tree.map(lambda x: PartitionSpec("data", *["model"] * (x.ndim == 2)), tree)
    shardings = jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs)
    placed = jax.device_put(tree, shardings)
    assert placed["x"].sharding == NamedSharding(MESH, PartitionSpec("data"))
    assert placed["n", "y"].sharding == NamedSharding(MESH, PartitionSpec("data", "model"))
    assert_same_values(placed, tree)
    jitted = jax.jit(square, in_shardings=(shardings,), out_shardings=shardings)(tree)
    assert jitted["n", "y"].sharding == shardings["n", "y"]
    assert_same_values(jitted, square(plain(tree)))


@pytest.mark.parametrize("tree", [TREES["arraydict"], TREES["tensordict"]])
def test_axes_and_specs_are_prefixes_or_trees(tree):
    """in_axes, out_axes, in_specs and out_specs take one value for the tree, or a tree of them."""
    axes = jax.tree.map(lambda _: 1, tree)
    for in_axes in ((1,), (axes,)):
        for out_axes in (1, axes):
            result = jax.vmap(square, in_axes=in_axes, out_axes=out_axes)(tree)
            assert_same_values(result, square(plain(tree)))
    specs = jax.tree.map(lambda _: PartitionSpec("data"), tree)
    for spec in (PartitionSpec("data"), specs):
        result = jax.shard_map(square, mesh=MESH, in_specs=(spec,), out_specs=spec)(tree)
        assert_same_values(result, square(plain(tree)))


def test_a_custom_vjp_and_a_callback_pass_trees_through():
    """Trees are residuals, cotangents and operands of callbacks like any other pytree."""

    @jax.custom_vjp
    def function(tree: ArrayDict) -> jax.Array:
        return loss(tree)

    function.defvjp(lambda tree: (loss(tree), tree), lambda tree, g: (tree.map(lambda x: x * g),))
    assert_same_values(jax.grad(function)(AD), AD)
    doubled = jax.pure_callback(lambda tree: tree.map(lambda x: 2 * x), AD, AD)
    np.testing.assert_array_equal(doubled["n", "y"], 2 * np.asarray(AD["n", "y"]))


def test_map_is_tree_map():
    """ad.map(f, *others) is jax.tree.map(f, ad, *others)."""
    assert_same_values(AD.map(jnp.add, AD), jax.tree.map(jnp.add, AD, AD))
    mask = AD.map(lambda x: x.ndim > 2)
    assert mask.to_dict() == {"n": {"e": {}, "y": False}, "s": "text", "x": True}


def test_methods_are_traceable():
    """select, replace, indexing and | inside jit give what they give outside."""

    def work(ad: ArrayDict) -> ArrayDict:
        rest = ad.exclude("x").replace({("n", "y"): ad["n", "y"] + 1})
        return (rest | {"z": ad["x"][..., 0]})[1:].flatten_keys()

    assert_same_values(jax.jit(work)(AD), work(AD))
    assert jax.tree.structure(jax.jit(work)(AD)) == jax.tree.structure(work(AD))
