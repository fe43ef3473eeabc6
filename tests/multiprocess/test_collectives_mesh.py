"""The calls over a `jax.sharding.Mesh`, between the processes of a jax.distributed job."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from tensordict import TensorDict

import tdbridge
from tdbridge import collectives
from tests.multiprocess.pool import Pool
from tests.multiprocess.trees import (
    CARRIES,
    COMPLEX,
    FLOAT8,
    FORMS,
    bits,
    consolidated,
    part,
    reduced,
    text_of,
    wrong,
)

pytestmark = pytest.mark.xdist_group("multiprocess")

NAMES = sorted({*CARRIES["max"], *COMPLEX, *FLOAT8})
SHAPE = 3, 5


@pytest.fixture(params=["two", "four"])
def jobs(request: pytest.FixtureRequest) -> Pool:
    return request.getfixturevalue(request.param)


def mesh() -> Mesh:
    """All devices of the job: two in each process."""
    return Mesh(np.array(jax.devices()).reshape(-1, 2), ("process", "device"))


def of_rank(rank: int) -> dict[str, np.ndarray]:
    return {name: part(name, rank, *SHAPE) for name in NAMES}


def reduced_trees() -> Any:
    rank, found = jax.process_index(), {}
    for op, names in CARRIES.items():
        for form, make in FORMS.items():
            result = collectives.all_reduce(make(names, rank, *SHAPE), op, mesh())
            found[op, form] = bits(result)
    return found


def test_all_reduce_gives_each_process_what_numpy_gives(jobs: Pool):
    """For every dtype, reduction and form of a tree."""
    for found in jobs.run(reduced_trees):
        for (op, form), got in found.items():
            parts = {n: [part(n, i, *SHAPE) for i in range(jobs.size)] for n in CARRIES[op]}
            assert not wrong(got, {n: reduced(op, p) for n, p in parts.items()}), (op, form)


def moved() -> Any:
    rank, size, group = jax.process_index(), jax.process_count(), mesh()
    tree = consolidated(NAMES, rank, *SHAPE)
    trees = [consolidated(NAMES, rank * size + i, *SHAPE) for i in range(size)]
    stack = collectives.all_gather(tree, group)
    every = collectives.all_gather(tree, group, stacked=False)
    swapped = collectives.all_to_all(trees, group)
    names = CARRIES["max"]
    largest = [consolidated(names, rank * size + i, *SHAPE) for i in range(size)]
    own = collectives.reduce_scatter(largest, "max", group)
    address = tree["bool"].data_ptr() if "bool" in tree else tree["n", "bool"].data_ptr()
    sent = collectives.broadcast(tree, 1, group, async_op=True).wait()
    there = sent["bool"] if "bool" in sent else sent["n", "bool"]
    nothing = collectives.broadcast(tree if rank == 1 else None, 1, group, to="jax")
    return {
        "stack": bits(stack),
        "every": [*map(bits, every)],
        "swapped": bits(swapped),
        "own": bits(own),
        "sent": bits(sent),
        "same": sent is tree and there.data_ptr() == address,
        "nothing": bits(nothing),
        "kinds": [type(t).__name__ for t in (stack, every[0], nothing)],
    }


def test_trees_go_between_the_processes(jobs: Pool):
    """As over torch.distributed: the values, and who has them."""
    size = jobs.size
    for rank, found in enumerate(jobs.run(moved)):
        stack = {n: np.stack([part(n, i, *SHAPE) for i in range(size)]) for n in NAMES}
        assert not wrong(found["stack"], stack)
        assert [wrong(got, of_rank(i)) for i, got in enumerate(found["every"])] == [[]] * size
        senders = [of_rank(sender * size + rank) for sender in range(size)]
        assert not wrong(found["swapped"], {n: np.stack([s[n] for s in senders]) for n in NAMES})
        largest = {n: reduced("max", [s[n] for s in senders]) for n in CARRIES["max"]}
        assert not wrong(found["own"], largest)
        assert not wrong(found["sent"], of_rank(1))
        assert not wrong(found["nothing"], of_rank(1))
        assert found["same"]
        last = "TensorDict" if rank == 1 else "ArrayDict"
        assert found["kinds"] == ["TensorDict", "TensorDict", last]


def disagreeing() -> Any:
    group, rank = mesh(), jax.process_index()
    own = TensorDict(x=torch.ones(3 + rank))
    first = text_of(collectives.all_reduce, own, "sum", group)
    same = bool((own["x"] == 1).all())
    again = collectives.all_reduce({"x": torch.ones(2)}, "sum", group)["x"].tolist()
    changed = {"x": torch.ones(2)} if rank else {"x": torch.ones(2, dtype=torch.int64)}
    later = text_of(collectives.all_reduce, changed, "sum", group)
    refused = [
        text_of(collectives.reduce, own, 0, "sum", group),
        text_of(collectives.send, own, 0, group),
    ]
    last = collectives.all_reduce({"x": torch.ones(2)}, "sum", group)["x"].tolist()
    return first, same, again, later, refused, last


def test_every_process_raises_where_one_has_another_tree(two: Pool):
    """At the first call and later; the group goes on."""
    for first, same, again, later, refused, last in two.run(disagreeing):
        assert "['x']: float32 [3] on rank 0, float32 [4] on rank 1" in first
        assert same
        assert again == last == [2.0, 2.0]
        assert "['x']: int64 [2] on rank 0, float32 [2] on rank 1" in later
        assert "all_reduce gives the result" in refused[0]
        assert "ppermute" in refused[1]


def test_one_process_is_a_group_of_one():
    """The result is its own tree; a mesh of several devices has one member."""
    group = Mesh(np.array(jax.devices()), ("i",))
    td = tdbridge.consolidate(TensorDict(x=torch.arange(3.0)))
    assert collectives.all_reduce(td, "mean", group) is td
    assert td["x"].tolist() == [0, 1, 2]
    assert collectives.all_gather(td, group)["x"].tolist() == [[0, 1, 2]]
