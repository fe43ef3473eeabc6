"""broadcast, all_gather, gather, scatter, all_to_all, send and recv: values, and who has them."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

import tdbridge
from tdbridge import collectives
from tests.multiprocess.pool import Pool
from tests.multiprocess.trees import (
    CARRIES,
    COMPLEX,
    FLOAT8,
    FORMS,
    arraydict,
    bits,
    columns,
    consolidated,
    group_of,
    part,
    text_of,
    wrong,
)

pytestmark = pytest.mark.xdist_group("multiprocess")

NAMES = sorted({*CARRIES["max"], *COMPLEX, *FLOAT8})
SHAPE = 3, 5


@pytest.fixture(autouse=True)
def started(request: pytest.FixtureRequest) -> None:
    """JAX starts on all ranks at once: one that starts later would wait for the others."""
    for name in ("two", "three", "four", "each"):
        if name in request.fixturenames:
            request.getfixturevalue(name).run(jax.local_device_count)


def of_rank(rank: int) -> dict[str, np.ndarray]:
    return {name: part(name, rank, *SHAPE) for name in NAMES}


def stack_of(size: int) -> dict[str, np.ndarray]:
    return {name: np.stack([part(name, rank, *SHAPE) for rank in range(size)]) for name in NAMES}


def broadcast() -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    for form, make in FORMS.items():
        found[form] = bits(collectives.broadcast(make(NAMES, rank, *SHAPE), src=1))
    other = dist.new_group(list(range(dist.get_world_size())))
    tree = consolidated(NAMES, 1, *SHAPE) if rank == 1 else None
    found["nothing"] = bits(collectives.broadcast(tree, src=1, group=other))
    return found


def test_broadcast_gives_each_rank_the_values_of_one(each: Pool):
    """Of every dtype, in every kind of tree, and where nothing was passed."""
    for found in each.run(broadcast):
        for form, got in found.items():
            assert not wrong(got, of_rank(1)), form


def gathered(form: str) -> Any:
    tree = FORMS[form](NAMES, dist.get_rank(), *SHAPE)
    stack = collectives.all_gather(tree)
    trees = collectives.all_gather(tree, stacked=False)
    one = collectives.gather(tree, dst=0)
    kinds = [type(x).__name__ for x in (stack, trees[0])]
    aligned = form != "consolidated" or all(
        tree.is_consolidated() and all(x.data_ptr() % 64 == 0 for x in tree.values(True, True))
        for tree in trees
    )
    return bits(stack), [*map(bits, trees)], None if one is None else bits(one), kinds, aligned


@pytest.mark.parametrize("form", ["consolidated", "columns", "arraydict"])
def test_gathering_gives_the_trees_of_all(each: Pool, form: str):
    """As one tree with a dimension more, and as a list; `gather` to one rank alone."""
    kind = "ArrayDict" if form == "arraydict" else "TensorDict"
    for rank, (stack, trees, one, kinds, aligned) in enumerate(each.run(gathered, form)):
        assert not wrong(stack, stack_of(each.size))
        assert [wrong(tree, of_rank(i)) for i, tree in enumerate(trees)] == [[]] * each.size
        assert one is None if rank else not wrong(one, stack_of(each.size))
        assert (kinds, aligned) == ([kind, kind], True)


def gathered_again() -> Any:
    rank = dist.get_rank()
    first = collectives.all_gather(consolidated(NAMES, 7, *SHAPE))
    leaves = [leaf.data_ptr() for leaf in first.values(True, True)]
    again = collectives.all_gather(columns(NAMES, rank, *SHAPE), out=first)
    same = again is first and leaves == [leaf.data_ptr() for leaf in again.values(True, True)]
    group = group_of(tuple(range(dist.get_world_size())))
    wrongs = [
        text_of(collectives.all_gather, consolidated(NAMES, 7, 2, 2), group, out=first),
        text_of(collectives.all_gather, consolidated(NAMES, 7, *SHAPE), group, out=first.clone()),
        text_of(collectives.all_gather, arraydict(NAMES, 7, *SHAPE), group, out={}),
        text_of(collectives.all_gather, first, group, out=first, pad=True),
    ]
    return bits(again), same, wrongs


def test_gathering_into_what_was_given_before(two: Pool):
    """The same leaves with new values; anything else is refused."""
    for found, same, wrongs in two.run(gathered_again):
        assert not wrong(found, stack_of(2))
        assert same
        assert all("not what all_gather gave" in text for text in wrongs[:3]), wrongs
        assert "out= is for stacked trees" in wrongs[3]


def exchanged() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    trees = [consolidated(NAMES, rank * size + i, *SHAPE) for i in range(size)]
    other = dist.new_group(list(range(size)))
    scattered = collectives.scatter(None, trees if rank == 1 else None, src=1, group=other)
    own = consolidated(NAMES, 0, *SHAPE)
    pointer = own["float32"].data_ptr() if "float32" in own else own["n", "float32"].data_ptr()
    into = collectives.scatter(own, trees if rank == 1 else None, src=1)
    there = into["float32"] if "float32" in into else into["n", "float32"]
    stack = collectives.all_to_all(torch.stack([tree.clone() for tree in trees]))
    return bits(scattered), bits(into), bits(stack), there.data_ptr() == pointer


def test_scatter_and_all_to_all_give_each_rank_its_own(each: Pool):
    """A tree per rank, of a list and of one tree with a dimension more; in place where asked."""
    size = each.size
    for rank, (scattered, into, stack, same) in enumerate(each.run(exchanged)):
        assert not wrong(scattered, of_rank(size + rank))
        assert not wrong(into, of_rank(size + rank))
        expected = [of_rank(sender * size + rank) for sender in range(size)]
        assert not wrong(stack, {n: np.stack([one[n] for one in expected]) for n in NAMES})
        assert same


def sent() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    peer, source = (rank + 1) % size, (rank - 1) % size
    found = {}
    for form, make in FORMS.items():
        handle = collectives.isend(make(NAMES, rank, *SHAPE), dst=peer)
        found[form] = bits(collectives.recv(make(NAMES, 0, *SHAPE), src=source))
        handle.wait()
    for turn in range(2):  # with the layout, and without it
        handle = collectives.isend(consolidated(NAMES, rank, *SHAPE), dst=peer)
        found[f"nothing {turn}"] = bits(collectives.irecv(src=source).wait())
        handle.wait()
    return found


def test_what_is_sent_is_received(each: Pool):
    """Around a ring, in every kind of tree and into nothing."""
    for rank, found in enumerate(each.run(sent)):
        for form, got in found.items():
            assert not wrong(got, of_rank((rank - 1) % each.size)), form


def told() -> Any:
    rank = dist.get_rank()
    td = TensorDict({"x": torch.arange(3.0), "name": "run", "n": {"y": torch.ones(2, 3)}}, [])
    group, own = dist.new_group(list(range(dist.get_world_size()))), td if rank == 0 else None
    found = collectives.broadcast(own, 0, group)
    arrays = collectives.broadcast(own, 0, group, to="jax")
    name = found["name"]
    td["name"] = "later"  # of rank 0, which gets its own tree back
    again = collectives.broadcast(own, 0, group)
    return name, again["name"], list(found.keys()), type(arrays).__name__


def test_what_comes_to_nothing_is_all_of_the_tree(two: Pool):
    """Non-tensor values too, also those that changed since the layout was sent."""
    first, other = two.run(told)
    assert first[:2] == other[:2] == ("run", "later")
    assert sorted(first[2]) == sorted(other[2]) == ["n", "name", "x"]
    assert (first[3], other[3]) == ("TensorDict", "ArrayDict")


def ragged(lengths: list[int]) -> Any:
    length = lengths[dist.get_rank()]
    tree = TensorDict({"x": torch.full((length, 2), 1.0 + dist.get_rank())}, [length])
    stack = collectives.all_gather(tree, pad=True)
    trees = collectives.all_gather(tdbridge.to_jax(tree), pad=True, stacked=False)
    return stack["x"].numpy(), [np.asarray(one["x"]) for one in trees], stack.batch_size


def test_batches_of_several_lengths_are_padded(three: Pool):
    """With zeros to the longest; in a list each keeps its own length."""
    lengths = [2, 0, 3]
    padded = np.zeros((3, 3, 2), np.float32)
    for rank, length in enumerate(lengths):
        padded[rank, :length] = 1.0 + rank
    for stack, trees, size in three.run(ragged, lengths):
        assert np.array_equal(stack, padded)
        assert [one.tolist() for one in trees] == [
            [[1.0 + rank] * 2] * length for rank, length in enumerate(lengths)
        ]
        assert size == torch.Size([3, 3])
