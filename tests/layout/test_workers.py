"""A consolidated tree in other processes: a multiprocessing queue, a DataLoader worker."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch.multiprocessing
from torch.utils.data import DataLoader

from tdbridge import consolidate
from tests import zoo
from tests.layout.check import (
    Consolidated,
    assert_leaves_in_one_buffer,
    assert_same_leaves,
    assert_same_nodes,
    expected_seen,
    only,
    seen,
    seen_nodes,
)


@pytest.fixture(scope="module")
def worker() -> Iterator[ProcessPoolExecutor]:
    """One spawned process behind a queue of torch.multiprocessing."""
    context = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        yield pool


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_tree_crosses_a_queue(worker, name):
    """The process at the other end sees the same bits at aligned addresses, and the same tree."""
    tree = consolidate(zoo.TREES[name]())
    assert worker.submit(seen, tree).result(timeout=120) == expected_seen(zoo.expected(name))
    assert worker.submit(seen_nodes, tree).result(timeout=120) == seen_nodes(zoo.TREES[name]())


@pytest.mark.parametrize("name", ["flat", "tensorclass_inside", "narrow_dtypes"])
def test_a_queue_shares_the_memory(worker, name):
    """As with any tensor of torch, what the other process writes is seen here."""
    tree = consolidate(zoo.TREES[name]())
    found = worker.submit(fill, tree).result(timeout=120)
    assert found == expected_seen(zoo.expected(name))
    assert all(not leaf.view(torch.uint8).any() for leaf in zoo.leaves(tree).values())


def fill(tree):
    """Zeroes every leaf, in the worker; gives back what it saw before."""
    before = seen(tree)
    for leaf in zoo.leaves(tree).values():
        leaf.reshape(-1).view(torch.uint8).zero_()
    return before


def test_trees_come_from_a_dataloader_worker():
    """A worker consolidates; the loader hands out the same bits, aligned, in one buffer."""
    names = list(zoo.TREES)
    loader = DataLoader(
        Consolidated(names), num_workers=1, collate_fn=only, multiprocessing_context="spawn"
    )
    for name, tree in zip(names, loader, strict=True):
        assert_same_leaves(tree, zoo.expected(name))
        assert_same_nodes(tree, zoo.TREES[name](), order=False)
        assert_leaves_in_one_buffer(tree)
