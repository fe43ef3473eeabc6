"""The static half of a tree: hashable, comparable, free of leaves, order, devices and processes."""

import base64
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch
from tensordict import NonTensorData, TensorDict

import tdbridge
from tdbridge import ArrayDict
from tests import zoo
from tests.pytrees.trees import STRUCTURES, arrays

VALUES = [
    "text", 3, 0.5, True, None, float("nan"), (1, [2, {"k": {3}}]), np.arange(3), b"x", 1j,
    np.float32(1), torch.arange(3), torch.float32, {"a": 1, "b": 2},
]  # fmt: skip


def aux(tree: Any) -> Any:
    """The aux data of the root, by JAX's own way to read it."""
    return jax.tree.structure(tree).node_data()[1]


@pytest.mark.parametrize("name", STRUCTURES)
def test_aux_data_is_hashable_and_equal_for_equal_trees(name):
    """Two trees built alike have equal definitions, equal aux data and equal hashes."""
    for make in (zoo.TREES[name], lambda: arrays(name)):
        a, b = make(), make()
        assert jax.tree.structure(a) == jax.tree.structure(b)
        assert aux(a) == aux(b)
        assert hash(aux(a)) == hash(aux(b))
        assert hash(jax.tree.structure(a)) == hash(jax.tree.structure(b))
        assert optree.tree_structure(a) == optree.tree_structure(b)
        assert hash(optree.tree_structure(a)) == hash(optree.tree_structure(b))


def reordered(td: Any, names: Any) -> TensorDict:
    """The same tree, its keys put in from last to first."""
    new = TensorDict({}, td.batch_size, names=names)
    for key in reversed(list(td.keys())):
        value = td.get(key)
        new[key] = reordered(value, value.names) if type(value) is TensorDict else value
    return new


@pytest.mark.parametrize("name", [n for n in STRUCTURES if type(zoo.TREES[n]()) is TensorDict])
def test_the_order_of_the_keys_does_not_count(name):
    """A tree built in the other order has the same definition, and its leaves the same order."""
    a = zoo.TREES[name]()
    b = reordered(a, a.names)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert optree.tree_structure(a) == optree.tree_structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    assert all(x is y for x, y in pairs)


def test_the_device_does_not_count():
    """A tensordict that declares a device and one that does not have the same definition."""
    plain = TensorDict({"x": torch.zeros(2)}, [2])
    assert jax.tree.structure(plain) == jax.tree.structure(plain.to("cpu"))


@pytest.mark.parametrize(
    "other",
    [
        lambda t: t.exclude("a"),
        lambda t: t.replace(c=t["a"]),
        lambda t: t.replace(a=t["b"]),
        lambda t: t.replace(s="other"),
        lambda t: t.exclude("s"),
        lambda t: ArrayDict(t, [2]),
        lambda t: ArrayDict(t, [2], names=["other"]),
        lambda t: ArrayDict(t, []),
        lambda t: t.replace(e={"e": {}}),
    ],
)
def test_what_the_tree_is_counts(other):
    """Keys, ranks of the leaves, batch ranks, names and non-tensor values are in the definition."""
    source = {"a": jnp.zeros(2), "b": jnp.zeros((2, 3)), "s": "text", "e": {}}
    ad = ArrayDict(source, [2], names=["name"])
    assert jax.tree.structure(ad) != jax.tree.structure(other(ad))


def test_the_class_counts():
    """A tensorclass and a TensorDict of the same entries differ, also as ArrayDicts."""
    step = zoo.Step(obs=torch.zeros(2), label="x", batch_size=[2])
    plain = TensorDict({"obs": torch.zeros(2), "label": "x"}, [2])
    assert jax.tree.structure(step) != jax.tree.structure(plain)
    a, b = tdbridge.to_jax(step), tdbridge.to_jax(plain)
    assert jax.tree.structure(a) != jax.tree.structure(b)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_any_non_tensor_value_is_hashable_and_compared_by_content(value):
    """Lists, dicts, arrays and NaN in a tree neither fail to hash nor differ from their copies."""

    def tree(data: Any) -> TensorDict:
        td = TensorDict({"x": torch.zeros(2)}, [2])
        td["value"] = NonTensorData(data, batch_size=[2])
        return td

    a, b = tree(value), tree(pickle.loads(pickle.dumps(value)))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert hash(aux(a)) == hash(aux(b))
    assert jax.tree.structure(a) != jax.tree.structure(tree("another"))


@pytest.mark.parametrize("pair", [(1, True), (1, 1.0), ((1,), [1]), ("1", 1), (0.0, -0.0)])
def test_values_of_other_types_differ(pair):
    """1, 1.0 and True are equal in Python and would share one compiled function: they differ."""
    a, b = (
        tdbridge.to_jax(
            TensorDict({"x": torch.zeros(2), "v": NonTensorData(data=v, batch_size=[2])}, [2])
        )
        for v in pair
    )
    assert jax.tree.structure(a) != jax.tree.structure(b)


@pytest.mark.parametrize("name", STRUCTURES)
def test_equal_structures_are_traced_once(name):
    """jit traces a function once for all trees of one structure, results and copies included."""
    traces = []

    @jax.jit
    def identity(tree: Any) -> Any:
        traces.append(tree.batch_size)
        return tree

    ad = arrays(name)
    identity(identity(ad))
    identity(arrays(name))
    identity(pickle.loads(pickle.dumps(ad)))
    assert traces == [ad.batch_size]


def test_the_order_of_construction_costs_no_trace():
    """Trees whose keys were given in another order, at every level, share one trace."""
    traces = []
    total = jax.jit(lambda ad: traces.append(ad.batch_size) or ad["n", "y"].sum())
    a, b, c = jnp.zeros(2), jnp.ones((2, 3)), jnp.zeros((2, 1))
    total(ArrayDict({"x": a, "n": {"y": b, "z": c}, "s": {"k"}}, [2]))
    total(ArrayDict({"s": {"k"}, "n": {"z": c, "y": b}, "x": a}, [2]))
    total(ArrayDict({"s": {"k"}, "n": {"z": c}}, [2]).replace({("n", "y"): b}).replace(x=a))
    total(ArrayDict({}, [2]).replace({("n", "z"): c, ("n", "y"): b}) | {"x": a, "s": {"k"}})
    assert traces == [(2,)]


def test_another_structure_is_traced_again():
    """A changed non-tensor value is another structure: the trace may have read it."""
    seen = []
    read = jax.jit(lambda tree: seen.append(tree["s"]))
    ad = ArrayDict({"x": jnp.zeros(2), "s": "one"}, [2])
    for value in ("one", "two", "one"):
        read(ad.replace(s=value))
    assert seen == ["one", "two"]


ELSEWHERE = """
import base64, pickle
import jax, numpy as np
from tdbridge import ArrayDict
from tests import zoo
trees = [{tree}, zoo.non_tensors(), zoo.tensorclass()]
ours = [jax.tree.structure(tree).node_data()[1] for tree in trees]
theirs = pickle.loads(base64.b64decode({pickled!r}))
assert theirs == ours
assert list(map(hash, theirs)) == list(map(hash, ours))
"""
TREE = 'ArrayDict({"x": np.zeros((2, 3)), "n": {"e": {}}, "s": "text"}, [2], names=["t"])'


def test_a_definition_survives_the_process(fresh):
    """Unpickled where strings hash in another way, a definition equals ours, and hashes as ours."""
    trees = [eval(TREE), zoo.non_tensors(), zoo.tensorclass()]
    definitions = [aux(tree) for tree in trees]
    assert len({hash(definition) for definition in definitions}) == 3
    pickled = base64.b64encode(pickle.dumps(definitions))
    fresh(ELSEWHERE.format(tree=TREE, pickled=pickled))


@pytest.mark.parametrize("name", STRUCTURES)
def test_treedefs_are_pickled(name):
    """JAX and optree pickle the definition of any tree of the zoo; unpickled it is equal."""
    for tree in (zoo.TREES[name](), arrays(name)):
        for definition in (jax.tree.structure(tree), optree.tree_structure(tree)):
            assert pickle.loads(pickle.dumps(definition)) == definition
