"""Which ranks take part, who may send to whom, and what is left of the trees that were sent."""

import gc
import pickle
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh

import tdbridge
from tdbridge import collectives
from tests.multiprocess.pool import Pool
from tests.multiprocess.trees import group_of, text_of

pytestmark = pytest.mark.xdist_group("multiprocess")


def own(**more: Any) -> TensorDict:
    rank = dist.get_rank()
    return TensorDict({"x": torch.full((3,), 10.0**rank), "k": torch.tensor([rank]), **more}, [])


def in_subgroup() -> Any:
    group = group_of((1, 3))
    if group is None:
        return text_of(collectives.all_reduce, own(), "sum", dist.GroupMember.NON_GROUP_MEMBER)
    total = collectives.all_reduce(own(), "sum", group)["x"].tolist()
    by_rank = collectives.broadcast(own(), 3, group)["k"].tolist()
    by_position = collectives.broadcast(own(), group=group, group_src=0)["k"].tolist()
    one = collectives.reduce(own(), group=group, group_dst=1)
    many = collectives.gather(own(), 1, group)
    errors = [
        text_of(collectives.broadcast, own(), 0, group),
        text_of(collectives.broadcast, own(), 1, group, group_src=0),
        text_of(collectives.broadcast, own(), group=group),
        text_of(collectives.reduce, own(), group=group, group_dst=2),
        text_of(collectives.all_reduce, own(), "sum", 7),
    ]
    found = [None if tree is None else tree["x"].tolist() for tree in (one, many)]
    return total, by_rank, by_position, found, errors


def test_ranks_count_globally_or_within_a_group(four: Pool):
    """As in torch; a process that is no member is told so."""
    outside, first, also_outside, second = four.run(in_subgroup)
    assert "no member" in outside
    assert "no member" in also_outside
    for total, by_rank, by_position, _, errors in (first, second):
        assert (total, by_rank, by_position) == ([1010.0] * 3, [3], [1])
        assert "src=0: the group has the global ranks [1, 3]" in errors[0]
        assert "pass either src" in errors[1]
        assert "pass either src" in errors[2]
        assert "group_dst=2: the group has the global ranks [1, 3]" in errors[3]
        assert "got group=7: pass a ProcessGroup" in errors[4]
    assert first[3] == [None, [[10.0] * 3, [1000.0] * 3]]
    assert second[3] == [[1010.0] * 3, None]


def over_a_mesh() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    along_a = collectives.all_reduce(own(), "sum", (mesh, "a"))["x"].tolist()
    along_b = collectives.all_reduce(own(), "sum", (mesh, 1))["x"].tolist()
    sub = collectives.all_reduce(own(), "max", mesh["b"])["x"].tolist()
    return along_a, along_b, sub, text_of(collectives.all_reduce, own(), "sum", mesh)


def test_a_dimension_of_a_device_mesh_is_a_group(four: Pool):
    """By name, by number, or as a mesh of one dimension."""
    for rank, (along_a, along_b, sub, error) in enumerate(four.run(over_a_mesh)):
        column, row = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert along_a == [sum(10.0**r for r in column)] * 3
        assert along_b == [sum(10.0**r for r in row)] * 3
        assert sub == [10.0 ** row[1]] * 3
        assert "2 dimensions ('a', 'b'): pass (mesh, dimension)" in error


def test_an_array_that_cannot_go_is_named():
    store = dist.HashStore()  # type: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(tdbridge.LeafTypeError, match=r"\['a', 'k'\]: got dtype"):
            collectives.all_reduce({"a": {"k": np.array(["x"])}, "b": torch.ones(1)})
    finally:
        dist.destroy_process_group()


def test_without_a_group_there_is_one_clear_error():
    with pytest.raises(tdbridge.CollectiveError, match="not initialised"):
        collectives.all_reduce(TensorDict(x=torch.ones(1)), "sum")


def from_any() -> Any:
    if dist.get_rank():
        collectives.send(own(), 0)
        return None
    return sorted(collectives.recv(own(), None)["k"].item() for _ in range(2))


def test_recv_without_a_source_takes_what_comes_first(three: Pool):
    assert three.run(from_any)[0] == [1, 2]


def by_tags() -> Any:
    group: Any = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        handles = [collectives.isend(own(), 1, group, tag=tag) for tag in (1, 2)]
        handles += [collectives.isend(own(z=torch.ones(2)), 1, group, tag=1)]
        return [handle.wait() for handle in handles]
    second = collectives.recv(None, 0, group, tag=2)
    first = collectives.recv(None, 0, group, tag=1)
    third = collectives.recv(None, 0, group, tag=1)
    return [sorted(tree.keys()) for tree in (second, first, third)]


def test_tags_may_be_received_in_another_order(two: Pool):
    """The layout goes along for each tag."""
    assert two.run(by_tags)[1] == [["k", "x"], ["k", "x"], ["k", "x", "z"]]


def dropped() -> Any:
    group: Any = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        collectives.send(own(), 1, group)
        return None
    found = collectives.recv(None, 0, group)
    alive = ref(found)
    del found
    gc.collect()
    return alive() is None


def test_what_was_received_is_kept_by_nobody_else(two: Pool):
    assert two.run(dropped)[1]


def hostile(head: list[int], text: bytes) -> Any:
    group: Any = dist.new_group([0, 1])
    if dist.get_rank() == 1:
        dist.send(torch.tensor(head), 0, group)
        if text:
            dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0, group)
        return None
    tree = own()
    before = tree.clone()
    error = text_of(collectives.recv, tree, 1, group)
    return error, bool((tree == before).all())


LAYOUT = tdbridge.layout_of(TensorDict(x=torch.ones(2))).to_json().encode()


@pytest.mark.parametrize(
    ("head", "text", "words"),
    [
        ([1, 2, 0], b"", "no send of ours wrote"),
        ([1, 2, -5], b"", "no send of ours wrote"),
        ([1, 2, 2**40], b"", "no send of ours wrote"),
        ([1, 2, 7], b"garbage", "cannot be read"),
        ([1, 2, 2], b"\xff\xfe", "cannot be read"),
        ([1, 2, len(LAYOUT)], LAYOUT, "another fingerprint"),
    ],
)
def test_a_head_that_no_send_wrote_is_refused(two: Pool, head: list[int], text: bytes, words: str):
    """Nothing is written, and no memory is taken for what it announces."""
    error, same = two.run(hostile, head, text)[0]
    assert error.startswith("recv(src=1)")
    assert words in error
    assert same


def left(make: Any) -> Any:
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    tree, other = [make(own(n=TensorDict(y=torch.ones(2, 2)), name="run")) for _ in range(2)]
    before = described(tree)
    collectives.broadcast((tree, other)[rank], 0, group)
    collectives.reduce((other, tree)[rank], 0)
    collectives.all_gather(tree, group)
    collectives.gather(tree, 0, group)
    if rank:
        collectives.send(tree, 0, group)
    else:
        collectives.recv(None, 1, group)
    again = pickle.loads(pickle.dumps(tree))
    return before == described(tree), list(again["x"]) == list(tree["x"]), again["name"]


def described(tree: Any) -> Any:
    leaves = [tree["x"], tree["k"], tree["n", "y"]]
    consolidated = getattr(tree, "_consolidated", None)
    return (
        sorted(map(str, tree.keys(True))),
        tree.is_locked,
        tree["n"].is_locked,
        [leaf.data_ptr() for leaf in leaves],
        [leaf.tolist() for leaf in leaves],
        None if consolidated is None else sorted(consolidated["metadata"]),
        sorted(vars(tree)) if hasattr(tree, "__dict__") else None,
    )


def as_it_is(tree: Any) -> Any:
    return tree


@pytest.mark.parametrize("make", [as_it_is, tdbridge.consolidate])
def test_sources_are_as_they_were(two: Pool, make: Any):
    """Not locked, not moved, no keys added; and they still pickle."""
    for same, equal, name in two.run(left, make):
        assert (same, equal, name) == (True, True, "run")
