"""Collectives of trees with DTensors: over replicas of a shard, and nothing else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict, is_floating
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tdbridge import collectives, consolidate
from tests.multiprocess.jobs import mesh_of, raised
from tests.multiprocess.pool import Pool

pytestmark = pytest.mark.xdist_group("multiprocess")

HSDP = (Replicate(), Shard(0))
LEAVES = {"w": ((7, 3), torch.float32), "h": ((7, 2), torch.bfloat16), "n": ((5,), torch.int64)}
"""Each is cut unevenly over two ranks; its values are integers that bfloat16 holds."""


def values(name: str, replica: int) -> np.ndarray:
    shape, _ = LEAVES[name]
    return np.arange(np.prod(shape)).reshape(shape) * (replica + 1) + replica


def replica() -> int:
    return dist.get_rank() // 2


def leaf(name: str, placements: Any = HSDP) -> DTensor:
    """A DTensor of which each replica has values of its own, as gradients have."""
    whole = torch.from_numpy(values(name, replica())).to(LEAVES[name][1])
    return distribute_tensor(whole, mesh_of(2, 2), placements, src_data_rank=None)


def tree(make: str) -> Any:
    nested = {"w": leaf("w"), "n": {"h": leaf("h"), "n": leaf("n")}}
    plain = torch.full((2,), float(replica()))
    if make == "pytree":
        return {**nested, "plain": plain, "list": [torch.ones(1)]}
    td = TensorDict({**nested, "plain": plain, "text": "a"})
    return consolidate(td) if make == "consolidated" else td


def found_in(td: Any) -> list[Any]:
    leaves = [td["w"], td["n"]["h"], td["n"]["n"]]
    return [
        [(type(x), x.placements, x.device_mesh is mesh_of(2, 2)) for x in leaves],
        [x.full_tensor().to(torch.float64).numpy() for x in leaves],
        td["plain"].tolist(),
    ]


def pointers(td: Any) -> list[int]:
    leaves = [td["w"], td["n"]["h"], td["n"]["n"]]
    return [x.to_local().data_ptr() for x in leaves]


KINDS = ["consolidated", "tensordict", "pytree"]
NAMES = ["w", "h", "n"]


def reduced(make: str, op: str, options: Any) -> Any:
    td = tree(make)
    before = pointers(td)
    group = mesh_of(2, 2), "a"
    where = is_floating if op == "mean" else None
    if options == "async":
        new = collectives.all_reduce(td, op, group, where=where, async_op=True).wait()
    else:
        new = collectives.all_reduce(td, op, group, where=where, **options)
    in_place = pointers(new) == before and pointers(td) == before
    return [in_place, new is td or make == "pytree", *found_in(new)]


OPS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "sum": np.add,
    "max": np.maximum,
    "mean": lambda a, b: (a + b) / 2,
}


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_replicas_are_reduced_in_place(four: Pool, make: str, op: str):
    """Over the replicate dimension of HSDP the shards hold the result, and stay DTensors."""
    for in_place, same, kinds, wholes, plain in four.run(reduced, make, op, {}):
        assert in_place
        assert same
        assert kinds == [(DTensor, HSDP, True)] * 3
        for rank_values, name in zip(wholes, NAMES, strict=True):
            one, other = values(name, 0), values(name, 1)
            if (op, name) == ("mean", "n"):
                continue  # left out: each replica keeps its own
            expected = OPS[op](one, other)
            if name == "h":
                expected = torch.from_numpy(expected).to(torch.bfloat16).double().numpy()
            np.testing.assert_array_equal(rank_values, expected)
        assert plain == [{"sum": 1.0, "max": 1.0, "mean": 0.5}[op]] * 2


@pytest.mark.parametrize(
    "options", ["async", {"check": "always"}, {"accumulate": "float32"}], ids=str
)
def test_every_option_goes_with_shards(four: Pool, options: Any):
    """A handle, a check at each call, and sums in a wider dtype."""
    for found in four.run(reduced, "tensordict", "sum", options):
        assert found[:2] == [True, True]
        np.testing.assert_array_equal(found[3][0], values("w", 0) + values("w", 1))


def left_out() -> Any:
    td = consolidate(TensorDict(n=leaf("n")))
    collectives.all_reduce(td, "sum", (mesh_of(2, 2), "a"), where=is_floating)
    return td["n"].full_tensor().numpy()


def test_leaves_that_are_left_out_keep_their_values(four: Pool):
    """`where` goes by dtype, as without DTensors."""
    for rank, got in enumerate(four.run(left_out)):
        np.testing.assert_array_equal(got, values("n", rank // 2))


def sent_to_one(name: str) -> Any:
    td = tree("consolidated")
    group = mesh_of(2, 2)["a"]
    call = getattr(collectives, name)
    new = (
        call(td, group_dst=1, group=group)
        if name == "reduce"
        else call(td, group_src=1, group=group)
    )
    return new is td, found_in(td)[1]


def test_broadcast_gives_every_replica_the_shards_of_one(four: Pool):
    """The source is a member of the group: each shard index has one of its own."""
    for same, wholes in four.run(sent_to_one, "broadcast"):
        assert same
        for got, name in zip(wholes, NAMES, strict=True):
            np.testing.assert_array_equal(got, values(name, 1))


def test_reduce_changes_one_replica_alone(four: Pool):
    """Shards of the other replica are as they were."""
    for rank, (same, wholes) in enumerate(four.run(sent_to_one, "reduce")):
        assert same == (rank >= 2)
        expected = values("w", 0) + (values("w", 1) if rank >= 2 else 0)
        np.testing.assert_array_equal(wholes[0], expected)


def replicated() -> Any:
    mesh = mesh_of(2)
    own = DTensor.from_local(torch.full((3,), dist.get_rank() + 1.0), mesh, [Replicate()])
    tree = {"a": own, "b": torch.ones(1)}
    new = collectives.all_reduce(tree)
    return new["a"] is own, own.to_local().tolist(), new["b"].tolist()


def test_the_default_group_reduces_what_is_replicated(two: Pool):
    """Over all ranks, a DTensor that is cut nowhere."""
    assert two.run(replicated) == [(True, [3, 3, 3], [2])] * 2


def mesh_per_replica() -> Any:
    """FSDP alone, on the slice of the mesh that the rank's replica is."""
    whole = torch.from_numpy(values("w", replica())).float()
    own = distribute_tensor(whole, mesh_of(2, 2)["b"], [Shard(0)], src_data_rank=None)
    td = TensorDict(w=own)
    collectives.all_reduce(td, "sum", (mesh_of(2, 2), "a"))
    ok = own.full_tensor().numpy()
    # Ranks 0 and 3 hold different shards of meshes that neither of them knows both of.
    return ok, raised(collectives.all_reduce, td, "sum", diagonals())


def diagonals() -> Any:
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    return groups[0] if dist.get_rank() in (0, 3) else groups[1]


def test_a_mesh_for_each_replica(four: Pool):
    """DTensors of several meshes are reduced where the ranks hold the same shard of each."""
    for ok, error in four.run(mesh_per_replica):
        np.testing.assert_array_equal(ok, values("w", 0) + values("w", 1))
        assert error.startswith(
            "CollectiveError: the ranks call different things: all_reduce(op='sum', "
            "shards='Shard(dim=0) "
        )


# --- what is refused


def refused(op: str, placements: Any, group: Any) -> Any:
    partial = any(placement.is_partial() for placement in placements)
    own = DTensor.from_local(torch.ones(3), mesh_of(2, 2), placements) if partial else None
    td = TensorDict({"n": {"w": leaf("w", placements) if own is None else own}})
    td = consolidate(td)
    before = td["n", "w"].to_local().clone()
    members = (mesh_of(2, 2), group) if group else None
    call = getattr(collectives, op)
    error = raised(call, td, group=members, **({"group_src": 0} if op == "broadcast" else {}))
    count = torch.ones(1)
    dist.all_reduce(count)  # it would hang if one rank were somewhere else
    return error, torch.equal(before, td["n", "w"].to_local()), int(count)


ADVICE = (
    ", or the whole tensors, full_tensor(), or redistribute(placements=...) with Replicate() there "
    "first."
)


@pytest.mark.parametrize("op", ["all_reduce", "broadcast"])
@pytest.mark.parametrize(
    ("placements", "group", "along", "advice"),
    [
        (HSDP, "b", "'b'", "(mesh, 'a')"),
        (HSDP, None, "'b'", "(mesh, 'a')"),
        ((Shard(1), Replicate()), "a", "'a'", "(mesh, 'b')"),
        ((Shard(0), Shard(1)), None, "'a', 'b'", "a mesh dimension over which it is replicated"),
    ],
    ids=str,
)
def test_different_shards_are_refused(
    four: Pool, op: str, placements: Any, group: Any, along: str, advice: str
):
    """The error names leaf, placements and mesh dimension, on every rank; nothing is written."""
    start = (
        f"CollectiveError: ['n', 'w']: got a DTensor of {list(placements)} over the mesh "
        "dimensions ('a', 'b'): the ranks ["
    )
    end = f"] of the group hold different shards of it, along {along}. Pass group={advice}" + ADVICE
    for error, same, count in four.run(refused, op, placements, group):
        assert error.startswith(start)
        assert error.endswith(end)
        assert same
        assert count == 4


def test_a_pending_sum_is_refused(four: Pool):
    """A Partial leaf is no shard and no replica, whatever the group."""
    for error, same, count in four.run(refused, "all_reduce", (Replicate(), Partial()), "a"):
        assert error == (
            "CollectiveError: ['n', 'w']: got a DTensor of [Replicate(), Partial(sum)] over the "
            "mesh dimensions ('a', 'b'): a Partial one is a sum that is still to be done. Call "
            "redistribute(placements=...) with Replicate() or Shard(dim) there first."
        )
        assert same
        assert count == 4


def other_calls() -> list[str]:
    group = mesh_of(2, 2), "a"
    td, rank = TensorDict({"w": leaf("w")}), dist.get_rank(group[0].get_group("a"))
    batched = TensorDict({"w": leaf("w", (Replicate(), Replicate()))}, [7])
    two_rows = TensorDict(
        {"w": distribute_tensor(torch.ones(2, 4), group[0], HSDP, src_data_rank=None)}, [2]
    )
    return [
        raised(collectives.all_gather, td, group),
        raised(collectives.all_gather, {"w": td["w"]}, group),
        raised(collectives.all_gather, batched, group, pad=True),
        raised(collectives.gather, td, group=group, group_dst=0),
        raised(collectives.scatter, None, [td, td], group=group, group_src=rank),
        raised(collectives.reduce_scatter, [td, td], group=group),
        raised(collectives.reduce_scatter, two_rows, group=group),
        raised(collectives.all_to_all, two_rows, group),
        raised(collectives.send, td, group=group, group_dst=1 - rank),
        raised(collectives.recv, td, group=group, group_src=1 - rank),
    ]


def test_every_other_call_is_refused(four: Pool):
    """What is joined, cut or sent elsewhere is whole tensors; each call says what to pass."""
    for errors in four.run(other_calls):
        for error in errors:
            assert "['w']: got a DTensor of [Replicate(), " in error
            assert error.startswith("CollectiveError: ")
            assert (
                "over the mesh dimensions ('a', 'b'): only all_reduce, reduce and broadcast take "
                "DTensors, over a group along which they are replicated. Pass the local shards, "
                "to_local(), or the whole, full_tensor()." in error
            )


def without_a_tree() -> Any:
    mesh = mesh_of(2)
    whole = DTensor.from_local(torch.ones(3) * (dist.get_rank() + 1), mesh, [Replicate()])
    td = TensorDict(w=whole)
    error = raised(collectives.broadcast, td if dist.get_rank() == 0 else None, 0)
    collectives.broadcast(td, 0)  # the ranks are together, and the next call goes through
    return error, whole.to_local().tolist()


def test_a_member_without_a_tree_is_refused(two: Pool):
    """It would make plain tensors of shards: every rank raises, before anything is sent."""
    expected = (
        "CollectiveError: the ranks call different things: broadcast(src=0, shards='replicated') "
        "on rank 0, broadcast(src=0) on rank 1."
    )
    assert two.run(without_a_tree) == [(expected, [1, 1, 1])] * 2


def mixed_with_plain() -> Any:
    whole = DTensor.from_local(torch.ones(3), mesh_of(2), [Replicate()])
    return raised(collectives.all_reduce, {"w": whole if dist.get_rank() == 0 else torch.ones(3)})


def test_a_dtensor_here_and_a_plain_tensor_there_is_refused(two: Pool):
    """Nobody could say what the result is a part of."""
    for error in two.run(mixed_with_plain):
        assert error == (
            "CollectiveError: the ranks call different things: all_reduce(op='sum', "
            "shards='replicated') on rank 0, all_reduce(op='sum') on rank 1."
        )
