"""A DTensor is a global array and back: boxes, bits, memory and sums on every rank."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax.sharding import PartitionSpec
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tdbridge.convert.dtensor import array_to_dtensor, dtensor_to_array
from tests import zoo
from tests.multiprocess.jobs import box_of, distributed, mesh_of, only_shard
from tests.multiprocess.pool import Pool

pytestmark = pytest.mark.xdist_group("multiprocess")

P = PartitionSpec
FSDP_AND_TP = (_StridedShard(0, split_factor=2), Shard(0))

# (mesh, placements, shape, dtype), the spec that they have in JAX
ONE_AXIS = [
    ([Shard(0)], (8, 3), "float32", P("a")),
    ([Shard(1)], (3, 8), "float32", P(None, "a")),
    ([Replicate()], (3, 5), "float32", P()),
    ([Shard(0)], (8, 3), "bfloat16", P("a")),
    ([Shard(1)], (2, 8, 3), "bfloat16", P(None, "a")),
    ([Shard(0)], (8,), "bool", P("a")),
    ([Shard(0)], (8, 2), "float8_e4m3fn", P("a")),
    ([Shard(0)], (8, 2), "complex64", P("a")),
    ([Replicate()], (), "float32", P()),
    ([Shard(0)], (0, 3), "float32", P("a")),
]
TWO_AXES = [
    ([Shard(0), Shard(1)], (4, 6), "float32", P("a", "b")),
    ([Shard(1), Shard(0)], (4, 6), "bfloat16", P("b", "a")),
    ([Shard(0), Shard(0)], (8, 3), "float32", P(("a", "b"))),
    (FSDP_AND_TP, (8, 3), "float32", P(("b", "a"))),
    ([Replicate(), Shard(0)], (4, 3), "int32", P("b")),
    ([Shard(1), Replicate()], (3, 4), "float32", P(None, "a")),
    ([Replicate(), Replicate()], (3, 5), "bfloat16", P()),
]


def round_trip(mesh_shape: Any, placements: Any, shape: Any, name: str) -> dict[str, Any]:
    dtensor = distributed(mesh_shape, placements, shape, name)
    array: Any = dtensor_to_array(dtensor)
    back = array_to_dtensor(array)
    shard, local = only_shard(array), dtensor.to_local()
    return {
        "spec": array.sharding.spec,
        "shape": array.shape,
        "index": shard.index,
        "box": box_of(dtensor),
        "bits": [np.asarray(shard.data), zoo.as_numpy(back.to_local())],
        "pointers": {local.data_ptr(), back.to_local().data_ptr()}
        | ({shard.data.unsafe_buffer_pointer()} if local.numel() else set()),
        "same mesh": back.device_mesh is dtensor.device_mesh,
        "placements": back.placements == dtensor.placements,
        "strides": back.stride() == dtensor.stride(),
    }


def check_round_trip(pool: Pool, mesh_shape: Any, case: Any) -> None:
    placements, shape, name, spec = case
    whole = zoo.as_numpy(zoo.pattern(name, *shape))
    for found in pool.run(round_trip, mesh_shape, placements, shape, name):
        assert found["spec"] == spec
        assert found["shape"] == shape
        assert all(zoo.same_bits(bits, whole[found["box"]]) for bits in found["bits"])
        assert zoo.same_bits(whole[found["index"]], whole[found["box"]])
        assert len(found["pointers"]) == 1
        assert found["same mesh"]
        assert found["placements"]
        assert found["strides"]


@pytest.mark.parametrize("case", ONE_AXIS, ids=str)
def test_one_axis_over_two_ranks(two: Pool, case: Any):
    """Each rank's array is its box, over the same memory; back comes the same DTensor."""
    check_round_trip(two, (2,), case)


@pytest.mark.parametrize("case", ONE_AXIS, ids=str)
def test_one_axis_over_four_ranks(four: Pool, case: Any):
    """The same over four ranks."""
    check_round_trip(four, (4,), case)


@pytest.mark.parametrize("case", TWO_AXES, ids=str)
def test_two_axes_over_four_ranks(four: Pool, case: Any):
    """A mesh of two by two ranks: each order of the cuts, FSDP over tensor parallelism included."""
    check_round_trip(four, (2, 2), case)


def summed(mesh_shape: Any, placements: Any) -> float:
    array = dtensor_to_array(distributed(mesh_shape, placements, (8, 8), "float32"))

    @jax.jit
    def weighted(x: jax.Array) -> jax.Array:
        return (x * jnp.arange(64.0).reshape(8, 8)).sum()

    return float(weighted(array))


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((4,), [Replicate()]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), FSDP_AND_TP),
        ((2, 2), [Replicate(), Shard(0)]),
    ],
    ids=str,
)
def test_jit_computes_over_the_ranks(four: Pool, mesh_shape: Any, placements: Any):
    """A sum weighted by position, so that no box may be in another's place, is right everywhere."""
    values = zoo.as_numpy(zoo.pattern("float32", 8, 8))
    expected = float((values * np.arange(64.0).reshape(8, 8)).sum())
    assert four.run(summed, mesh_shape, placements) == [expected] * 4


def result_of_jit() -> Any:
    dtensor = distributed((2, 2), [Shard(0), Shard(1)], (4, 6), "float32")
    back = array_to_dtensor(jax.jit(lambda x: (x * 2).T)(dtensor_to_array(dtensor)))
    return back.placements, zoo.as_numpy(back.full_tensor())


def test_what_jit_computes_comes_back(four: Pool):
    """The result of a jitted function is a DTensor with the placements that XLA chose."""
    expected = 2 * zoo.as_numpy(zoo.pattern("float32", 4, 6)).T
    for placements, full in four.run(result_of_jit):
        assert placements == (Shard(1), Shard(0))
        np.testing.assert_array_equal(full, expected)


def write_in_torch() -> float:
    dtensor = distributed((2,), [Shard(0)], (8,), "float32")
    array = dtensor_to_array(dtensor)
    dtensor.to_local().fill_(dist.get_rank() + 1)
    return float(jax.jit(jnp.sum)(array))


def test_memory_is_shared_for_real(two: Pool):
    """What torch writes into its shard is what JAX adds up: 4 times 1 and 4 times 2."""
    assert two.run(write_in_torch) == [12.0, 12.0]


def from_half_the_ranks() -> Any:
    mesh = mesh_of(2, 2)["b"]  # ranks 0 and 1, or 2 and 3
    local = torch.full((2, 3), float(dist.get_rank()))
    array = dtensor_to_array(DTensor.from_local(local, mesh, [Shard(0)]))
    return array.shape, float(jax.jit(jnp.sum)(array)), array_to_dtensor(array).device_mesh is mesh


def test_a_slice_of_a_mesh(four: Pool):
    """Each half of the ranks has its own array over the devices of that half."""
    sums = [((4, 3), 6.0 * total, True) for total in (0 + 1, 0 + 1, 2 + 3, 2 + 3)]
    assert four.run(from_half_the_ranks) == sums
