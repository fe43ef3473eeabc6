"""A real Ray on this machine: two CPUs, two workers, nothing but 127.0.0.1."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictParams

import tdbridge
from tdbridge import ArrayDict, PackedArrayDict, consolidate, to_jax
from tests import zoo
from tests.layout.check import assert_leaves_in_one_buffer, assert_same_leaves, assert_same_nodes
from tests.pytrees.trees import arrays, assert_same_values
from tests.sending.store import Worker, in_object_store, places

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("sending"),
    # Of its own sockets and files at the end, and of what it will change.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    # Its processes are forked, and become another program at once.
    pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning"),
]
LARGE = 100_000  # elements: what is small does not go to the object store but with the call
ROOT = Path(__file__).parents[2]


def large() -> TensorDict:
    leaves = {f"x{i}": torch.arange(LARGE, dtype=torch.float32) + i for i in range(3)}
    return TensorDict({**leaves, "n": {"y": torch.ones(LARGE, dtype=torch.int64)}, "s": "text"})


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray without a dashboard, a report of its use, and a way to the network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=256 * 2**20,
        )
        try:
            tdbridge.sending.register_ray()
            yield
        finally:
            ray.shutdown()
    assert children() == []


def children() -> list[str]:
    """The processes that this one has started and that have not ended."""
    listed = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "stat=,args="],
        capture_output=True, text=True, check=False,
    ).stdout.splitlines()  # fmt: skip
    return [line for line in listed if "ray" in line and not line.startswith("Z")]


@pytest.fixture(scope="module")
def actor(cluster: None) -> Any:
    return ray.remote(num_cpus=1)(Worker).remote()


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_tree_arrives_consolidated(cluster, name):
    """Whatever it was before, and the source stays what it was."""
    for tree in (zoo.TREES[name](), consolidate(zoo.TREES[name]())):
        locked = tree.is_locked
        found = ray.get(ray.put(tree))
        assert_same_leaves(found, zoo.expected(name))
        assert_same_nodes(found, zoo.TREES[name](), order=False)
        assert_leaves_in_one_buffer(found)
        assert found.is_locked
        assert tree.is_locked == locked


@pytest.mark.parametrize("name", ["lazy_unequal", "values_in_two_dims", "lazy_of_lazy"])
def test_a_kind_arrives_consolidated(cluster, name):
    """Lazy stacks and values per element stay what they are."""
    found = ray.get(ray.put(zoo.KINDS[name]()))
    assert zoo.described(found) == zoo.described(zoo.KINDS[name]())
    assert found.is_consolidated()


@pytest.mark.parametrize("name", [*zoo.TREES])
def test_an_arraydict_arrives(cluster, name):
    """Exact, 64-bit leaves too; a packed one packed."""
    ad = arrays(name)
    found = ray.get(ray.put(ad))
    assert jax.tree.structure(found) == jax.tree.structure(ad)
    assert_same_values(found, ad)
    with jax.enable_x64(True):
        packed = to_jax(consolidate(zoo.TREES[name]()), packed=True)
    again = ray.get(ray.put(packed))
    assert type(again) is PackedArrayDict
    assert_same_values(again.unpack(), packed.unpack())


@pytest.mark.parametrize("make", [large, lambda: consolidate(large()), lambda: large()[None][0]])
def test_a_large_tree_is_read_where_it_lies(cluster, actor, make):
    """In the driver and in an actor, and by each reader at the same place."""
    reference = ray.put(make())
    one, two = ray.get(reference), ray.get(reference)
    assert in_object_store(places(one))
    assert places(one) == places(two)
    assert ray.get(actor.mapped.remote(reference))
    assert ray.get(actor.mapped.remote(make()))
    assert one["s"] == "text"


@pytest.mark.parametrize("packed", [False, True])
def test_large_arrays_are_read_where_they_lie(cluster, actor, packed):
    """JAX shares the memory of the object store."""
    ad = to_jax(consolidate(large().exclude("n")), packed=packed)
    found = ray.get(ray.put(ad))
    assert in_object_store(places(found))
    assert ray.get(actor.mapped.remote(ad))
    assert_same_values(found, ad)


def test_jax_shares_a_tree_that_was_read(cluster):
    """Its leaves are aligned there."""
    found = ray.get(ray.put(large().exclude("n")))
    ad = to_jax(found, copy=False)
    assert places(ad) == [leaf.data_ptr() for _, leaf in sorted(zoo.leaves(found).items())]


def test_numpy_arrays_are_read_only_as_ray_has_them(cluster):
    """Those in an ArrayDict, too."""
    found = ray.get(ray.put(ArrayDict({"n": np.ones(LARGE)})))
    assert type(found["n"]) is np.ndarray
    assert not found["n"].flags.writeable


def test_an_actor_gets_and_gives_trees(cluster, actor):
    """Arguments and results, of both frameworks."""
    td, ad = large(), arrays("narrow_dtypes")
    assert ray.get(actor.seen.remote(td)) == (True, True, {0}, True)
    found = ray.get(actor.echo.remote(td))
    assert found.is_consolidated()
    assert_same_leaves(found, {p: zoo.as_numpy(v) for p, v in zoo.leaves(td).items()})
    assert_same_values(ray.get(actor.echo.remote(ad)), ad)
    assert ray.get(actor.sum.remote(ArrayDict({"x": jnp.ones(7), "y": jnp.ones(3)}))) == 10


def test_a_worker_that_got_a_tree_sends_its_own_in_the_same_way(cluster, actor):
    """It is registered by then."""
    ray.get(actor.echo.remote(zoo.flat()))
    found = ray.get(actor.make.remote())
    assert found.is_consolidated()
    assert_same_leaves(found, zoo.expected("nested"))


def test_what_was_read_outlives_its_reference(cluster):
    """The object stays as long as a leaf of it is alive."""
    found = ray.get(ray.put(large()))
    ad = to_jax(ray.get(ray.put(large().exclude("n"))))
    leaf = found["x1"]
    del found
    gc.collect()
    for _ in range(8):  # as much as the store has room for
        ray.put(np.zeros(32 * 2**20, np.uint8))
    assert leaf[:3].tolist() == [1, 2, 3]
    assert ad["x2"][:3].tolist() == [2, 3, 4]


def test_a_write_reaches_everybody(cluster):
    """As the docs say: torch has no tensors that are read-only. A clone is one's own."""
    reference = ray.put(large())
    found = ray.get(reference)
    found.clone()["x0"].zero_()
    assert ray.get(reference)["x0"][5] == 5
    found["x0"].zero_()
    assert ray.get(reference)["x0"][5] == 0


def test_a_tree_that_consolidating_would_change_is_sent_as_before(cluster):
    """Parameters stay parameters, gradients are asked for there too."""
    found = ray.get(ray.put(TensorDictParams(TensorDict(w=torch.ones(3)))))
    assert isinstance(found, TensorDictParams)
    td = ray.get(ray.put(TensorDict(w=torch.ones(3, requires_grad=True))))
    assert td["w"].requires_grad
    assert not td.is_consolidated()


def test_registering_again_does_no_harm(cluster):
    """The first call stays."""
    tdbridge.sending.register_ray()
    assert ray.get(ray.put(zoo.flat())).is_consolidated()


def test_without_the_call_a_tree_is_copied_where_it_is_read():
    """It can be written to then."""
    program = f"""
import ray, torch, tdbridge
from tensordict import TensorDict
ray.init(num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False,
         logging_level="ERROR", object_store_memory={128 * 2**20})
reference = ray.put(tdbridge.consolidate(TensorDict(x=torch.ones({LARGE}))))
found = ray.get(reference)
found["x"].zero_()
print(found.is_consolidated(), int(ray.get(reference)["x"].sum()))
ray.shutdown()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.split() == ["True", str(LARGE)], done.stderr[-2000:]
