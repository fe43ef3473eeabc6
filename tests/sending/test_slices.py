"""Trees that look at a part of their memory: their pickle has that part alone."""

import pickle
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from tdbridge import consolidate
from tests import zoo
from tests.sending.routes import NEW, OLD, by_memory, by_protocol, by_torch, out_of_band

ROUTES = [*NEW, *OLD]
COUNT = 20_000  # bytes, times the leaves


def whole() -> TensorDict:
    """A hundred rows of 80 kB each."""
    leaves = {
        f"x{i}": torch.arange(COUNT, dtype=torch.int32).reshape(100, -1) + i for i in range(4)
    }
    return TensorDict({**leaves, "n": {"y": torch.ones(100, 200)}, "s": "text"}, [100])


def parts() -> dict[str, Any]:
    c = consolidate(whole())
    stock = whole().consolidate(metadata=True)
    unlocked = consolidate(whole())
    unlocked.unlock_()
    return {
        "rows": c[3:5],
        "row": c[7],
        "columns": c[:, None][:, 0],
        "entry": c[3:5]["n"],
        "of stock": stock[3:5],
        "of no buffer": whole()[3:5],
        "unlocked": unlocked,
        "lazy": LazyStackedTensorDict(c[1], c[2]),
        "step": zoo.Step(obs=c["x0"], label="a", batch_size=[100])[2:4],
        "subclass": zoo.Batch({"x": c["x0"], "y": c["x1"]}, [100])[2:4],
    }


def same(a: Any, b: Any) -> bool:
    return zoo.described(a) == zoo.described(b)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", parts())
def test_a_part_arrives(name, route):
    """With its values, its class and its entries, and unlocked as it was."""
    part = parts()[name]
    found = route(part)
    assert same(found, part)
    assert type(found) is type(part)
    assert found.is_locked == part.is_locked is False


@pytest.mark.parametrize("protocol", [3, 4, 5])  # the second has bytes as text
@pytest.mark.parametrize("name", parts())
def test_its_pickle_is_small(name, protocol):
    """About its own bytes, and a few hundred for each leaf."""
    part = parts()[name]
    own = sum(leaf.nbytes for leaf in part.values(True, True) if isinstance(leaf, torch.Tensor))
    assert len(pickle.dumps(part, protocol=protocol)) < own + 12_000


def test_stock_carries_the_whole_once_per_leaf():
    """Why this is done."""
    part = whole().consolidate(metadata=True)[3:5]
    leaves = [leaf for leaf in part.values(True, True) if isinstance(leaf, torch.Tensor)]
    assert len(pickle.dumps(leaves, protocol=5)) > len(leaves) * 4 * COUNT * 4


@pytest.mark.parametrize("name", ["rows", "of stock", "unlocked", "step"])
def test_it_is_one_buffer(name):
    """Out of band, aligned."""
    part = parts()[name]
    data, buffers = out_of_band(part)
    assert len(buffers) == 1
    found = pickle.loads(data, buffers=buffers)
    assert [leaf.data_ptr() % 64 for leaf in zoo.leaves(found).values()] == [0] * len(
        zoo.leaves(part)
    )


def test_a_locked_part_arrives_locked():
    """And consolidated."""
    part = consolidate(whole())[3:5].lock_()
    found = by_memory(part)
    assert found.is_locked
    assert found.is_consolidated()
    assert same(found, part)
    assert by_protocol(4)(part).is_locked


def test_a_nested_tree_of_one_that_stock_unpickled_is_a_part():
    """Stock gives each nested tree a record of the whole buffer."""
    outer = pickle.loads(pickle.dumps(whole().consolidate(metadata=True), protocol=4))
    assert len(pickle.dumps(outer["n"], protocol=4)) < 100 * 200 * 4 + 4000
    assert same(by_memory(outer["n"]), outer["n"])


def test_leaves_that_overlap_stay_tied_in_a_file():
    """torch.save stores their storage once, and they share it again."""
    base = torch.zeros(100_000)
    found = by_torch(TensorDict(a=base[:10], b=base[5:15]))
    found["a"][5] = 1
    assert found["b"][0] == 1


@pytest.mark.parametrize("route", [by_memory, by_protocol(4)])
def test_a_part_with_a_gradient_is_left_to_stock(route):
    """Consolidated, it would have none."""
    base = torch.zeros(100_000, requires_grad=True)
    assert route(TensorDict(a=base.detach()[:10].requires_grad_()))["a"].requires_grad


def test_the_source_is_not_changed():
    """It is neither locked nor consolidated, and its leaves stay where they are."""
    c = consolidate(whole())
    part = c[3:5]
    places = [leaf.data_ptr() for leaf in part.values(True, True) if isinstance(leaf, torch.Tensor)]
    for protocol in (2, 5):
        pickle.dumps(part, protocol=protocol)
    assert not part.is_locked
    assert not part.is_consolidated()
    now = [leaf.data_ptr() for leaf in part.values(True, True) if isinstance(leaf, torch.Tensor)]
    assert now == places
