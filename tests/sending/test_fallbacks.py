"""Where a private function of torch, tensordict or JAX is gone, the results are the same."""

import pickle
from operator import attrgetter

import jax
import pytest

import tdbridge._compat.jax as compat_jax
import tdbridge._compat.tensordict as compat_tensordict
import tdbridge._compat.torch as compat_torch
from tdbridge import consolidate
from tests import zoo
from tests.layout.check import assert_leaves_in_one_buffer, assert_same_leaves, assert_same_nodes
from tests.pytrees.trees import arrays, assert_same_values
from tests.sending.routes import by_bytes, by_memory

GONE = {
    "device_put": (compat_jax, "_batched_device_put", None),
    "sharding": (compat_jax, "_sharding_of", attrgetter("no_such_name")),
    "wait": (compat_jax, "_await_all", None),
    "new_unsafe": (compat_tensordict, "_HAS_NEW_UNSAFE", False),
    "capsule": (compat_torch, "_from_capsule", None),
}


@pytest.fixture(params=GONE)
def gone(request, monkeypatch) -> None:
    """Takes away what the library uses when it is there."""
    module, name, instead = GONE[request.param]
    assert getattr(module, name)
    monkeypatch.setattr(module, name, instead)


@pytest.mark.usefixtures("gone")
@pytest.mark.parametrize("route", [by_memory, by_bytes])
@pytest.mark.parametrize("name", zoo.TREES)
def test_trees_arrive(name, route):
    """TensorDicts and ArrayDicts, plain and packed."""
    found = route(consolidate(zoo.TREES[name]()))
    assert_same_leaves(found, zoo.expected(name))
    assert_same_nodes(found, zoo.TREES[name](), order=False)
    assert_leaves_in_one_buffer(found)
    ad = arrays(name)
    assert_same_values(route(ad), ad)
    assert jax.tree.structure(route(ad)) == jax.tree.structure(ad)


@pytest.mark.parametrize("protocol", [2, 5])
def test_trees_on_an_accelerator_are_left_to_stock(protocol):
    """Of any other device than the CPU; the meta device stands for them."""
    tree = consolidate(zoo.nested()).to("meta")
    assert tree.is_consolidated()
    assert b"tdbridge" not in pickle.dumps(tree, protocol=protocol)
