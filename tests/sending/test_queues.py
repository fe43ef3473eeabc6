"""Queues of multiprocessing: one buffer in shared memory, which both processes map."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
import torch.multiprocessing
from tensordict import TensorDict

from tdbridge import ArrayDict, consolidate, to_jax
from tdbridge.layout.placement import placement_of
from tests import zoo
from tests.layout.check import assert_same_leaves, expected_seen, misaligned, seen
from tests.pytrees.trees import arrays, assert_same_values

pytestmark = pytest.mark.xdist_group("sending")


@pytest.fixture(scope="module")
def worker() -> Iterator[ProcessPoolExecutor]:
    """One spawned process behind a queue of torch.multiprocessing."""
    context = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        yield pool


def run(worker: ProcessPoolExecutor, job: Any, *args: Any) -> Any:
    return worker.submit(job, *args).result(timeout=120)


def described(tree: Any) -> tuple[bool, bool, bool, bool]:
    """What the worker knows of a tree that it got."""
    leaves = zoo.leaves(tree).values()
    known = placement_of(tree) is not None
    return (
        tree.is_consolidated(),
        tree.is_locked,
        known,
        all(leaf.is_shared() and not misaligned(leaf) for leaf in leaves),
    )


def fill(tree: Any) -> Any:
    """Zeroes every leaf; gives back what was seen before."""
    before = seen(tree)
    for leaf in zoo.leaves(tree).values():
        leaf.reshape(-1).view(torch.uint8).zero_()
    return before


def echo(tree: Any) -> Any:
    return tree


def pointers(tree: Any) -> list[int]:
    return [a.unsafe_buffer_pointer() for a in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", ["flat", "nested", "tensorclass_inside", "subclass", "all_dtypes"])
def test_a_tree_arrives_in_shared_memory(worker, name):
    """Consolidated, locked, aligned, and where its leaves lie is known there."""
    assert run(worker, described, consolidate(zoo.TREES[name]())) == (True, True, True, True)


@pytest.mark.parametrize("name", ["flat", "tensorclass_inside", "subclass", "narrow_dtypes"])
def test_what_one_side_writes_the_other_sees(worker, name):
    """The memory is shared, not copied, also for a tree of a class of its own."""
    tree = consolidate(zoo.TREES[name]())
    assert run(worker, fill, tree) == expected_seen(zoo.expected(name))
    assert not any(leaf.view(torch.uint8).any() for leaf in zoo.leaves(tree).values())


def test_a_slice_is_shared_too(worker):
    """Without a copy of its part: what the worker writes is seen in the whole."""
    tree = consolidate(zoo.nested())
    run(worker, fill, tree[1:3])
    assert tree["next", "reward"].tolist() == [1, 0, 0, 4]
    assert not tree.is_shared() or tree.is_locked


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_tree_comes_back(worker, name):
    """There and back, bit for bit."""
    assert_same_leaves(run(worker, echo, consolidate(zoo.TREES[name]())), zoo.expected(name))


def test_memory_that_jax_holds_is_copied(worker):
    """torch would move it to shared memory, and leave the arrays on memory that it has freed."""
    tree = consolidate(zoo.nested())
    ad = to_jax(tree)
    places, before = pointers(ad), {p: np.array(v) for p, v in zoo.expected("nested").items()}
    assert run(worker, seen, tree) == expected_seen(before)
    assert not tree["obs"].is_shared()
    assert [leaf.data_ptr() for leaf in (tree["obs"],)] == [ad["obs"].unsafe_buffer_pointer()]
    assert pointers(ad) == places
    assert_same_values(ad, arrays("nested"))


def test_shared_memory_that_jax_holds_is_not_copied(worker):
    """`share_memory_()` before the conversion: then nothing has to move."""
    tree = consolidate(zoo.flat())
    placement_of(tree).storage.share_memory_()  # type: ignore[union-attr]
    ad = to_jax(tree, copy=False)
    run(worker, fill, tree)
    assert not np.asarray(ad["a"]).any()


def test_what_maps_a_file_is_copied(worker, tmp_path):
    """It has no descriptor that could be sent."""
    tree = consolidate(zoo.flat(), filename=tmp_path / "file")
    assert run(worker, fill, tree) == expected_seen(zoo.expected("flat"))
    assert_same_leaves(tree, zoo.expected("flat"))


def test_a_tree_that_is_not_consolidated_goes_as_before(worker):
    """Leaf by leaf, shared."""
    td = zoo.flat()
    run(worker, fill, td)
    assert not td["a"].any()


@pytest.mark.parametrize("name", ["nested", "all_dtypes", "tensorclass_inside", "empty"])
def test_arrays_cross(worker, name):
    """An ArrayDict, plain and packed, there and back, exact although x64 is off."""
    ad = arrays(name)
    found = run(worker, echo, ad)
    assert type(found) is ArrayDict
    assert jax.tree.structure(found) == jax.tree.structure(ad)
    assert_same_values(found, ad)
    with jax.enable_x64(True):
        packed = to_jax(consolidate(zoo.TREES[name]()), packed=True)
    assert_same_values(run(worker, echo, packed).unpack(), packed.unpack())


def mapped_from(tree: Any) -> set[str]:
    """What the memory of the arrays is mapped from, in the process that has them."""
    found = set()
    with open("/proc/self/maps", encoding="utf8") as maps:  # noqa: PTH123
        lines = [line.split(maxsplit=5) for line in maps]
    for place in pointers(tree):
        for line in lines:
            low, high = (int(part, 16) for part in line[0].split("-"))
            if low <= place < high:
                found.add(line[5].strip() if len(line) > 5 else "")
    return found


def test_arrays_lie_in_shared_memory(worker):
    """The worker's arrays are over the mapped buffer, not over copies."""
    (where,) = run(worker, mapped_from, arrays("nested"))
    assert "torch_" in where or "/dev/shm" in where
    assert "torch_" not in "".join(mapped_from(arrays("nested")))


def test_two_trees_of_one_memory_stay_tied(worker):
    """A tree and its memory by itself, in one message."""
    tree = consolidate(TensorDict(x=torch.zeros(16)))
    assert run(worker, tied, (tree, tree["x"]))


def tied(pair: Any) -> bool:
    tree, leaf = pair
    leaf.fill_(3)
    return tree["x"].tolist() == [3] * 16
