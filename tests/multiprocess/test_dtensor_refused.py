"""What cannot cross raises on every rank, says what to do, and leaves nobody waiting."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tdbridge.convert.dtensor import array_to_dtensor, dtensor_to_array
from tests.multiprocess.jobs import distributed, mesh_of, only_shard, raised
from tests.multiprocess.pool import Pool

pytestmark = pytest.mark.xdist_group("multiprocess")

P = PartitionSpec


def everyone_is_here() -> int:
    """A collective: it would hang if one rank were somewhere else."""
    count = torch.ones(1)
    dist.all_reduce(count)
    return int(count)


def refused_dtensor(mesh_shape: Any, placements: Any, shape: Any, name: str) -> Any:
    if any(p.is_partial() for p in placements):
        dtensor = DTensor.from_local(torch.ones(shape), mesh_of(*mesh_shape), placements)
    else:
        dtensor = distributed(mesh_shape, placements, shape, name)
    return raised(dtensor_to_array, dtensor), everyone_is_here()


PARTIAL = (
    "LeafTypeError: got {} on mesh axis {!r}, which JAX cannot spell: call "
    "dtensor.redistribute(placements=...) with Replicate() or Shard(dim) there first."
)
UNEVEN = (
    "LeafTypeError: got shape {}, whose dimension {} the mesh axes {} cut into 4 uneven pieces, "
    "which JAX refuses: pad it to {}, redistribute with that dimension replicated, or use a mesh "
    "whose size divides {}."
)
GAPS = (
    "LeafTypeError: got _StridedShard(dim=0, sf=2) on mesh axis 'b', under which a rank holds "
    "slices with gaps, which JAX cannot spell: call dtensor.redistribute(placements=...) with "
    "Shard(0) there first."
)
INT64 = (
    "LeafTypeError: got a DTensor of torch.int64 while x64 is off, and no rank alone knows whether "
    "all its values fit in 32 bits: turn x64 on, or cast it in torch first."
)
FLOAT64 = (
    "NarrowingError: 64-bit leaves do not fit in JAX while x64 is off:\n"
    "  []: got float64, which would be rounded.\n"
)
STRIDED = _StridedShard(0, split_factor=2)

REFUSED = {
    "partial": ((4,), [Partial()], (2,), "float32", PARTIAL.format("Partial(sum)", "a")),
    "one axis partial": (
        *((2, 2), [Shard(0), Partial("max")], (2,), "float32"),
        PARTIAL.format("Partial(max)", "b"),
    ),
    "uneven": (
        *((4,), [Shard(0)], (10, 3), "float32"),
        UNEVEN.format((10, 3), 0, "a", 12, 10),
    ),
    "fewer rows than ranks": (
        *((4,), [Shard(1)], (2, 3), "float32"),
        UNEVEN.format((2, 3), 1, "a", 4, 3),
    ),
    "uneven over two axes": (
        *((2, 2), [Shard(0), Shard(0)], (10,), "float32"),
        UNEVEN.format((10,), 0, "a, b", 12, 10),
    ),
    "gaps": ((2, 2), [Replicate(), STRIDED], (8,), "float32", GAPS),
    "int64": ((4,), [Shard(0)], (8,), "int64", INT64),
    "float64": ((4,), [Shard(0)], (8,), "float64", FLOAT64),
    "dtype": (
        *((4,), [Replicate()], (8,), "complex32"),
        "LeafTypeError: got dtype torch.complex32, which",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_dtensor_that_cannot_cross_raises_on_every_rank(four: Pool, name: str):
    """The same error everywhere, with the advice, and the ranks still meet afterwards."""
    *arguments, message = REFUSED[name]
    for error, count in four.run(refused_dtensor, *arguments):
        assert error.startswith(message)
        assert count == 4


def carried_with_x64() -> Any:
    dtensor: Any = distributed((4,), [Shard(0)], (8,), "int64") + 2**40
    with jax.enable_x64(True):
        array = dtensor_to_array(dtensor)
        return array.dtype, np.asarray(only_shard(array).data).tolist()


def test_x64_carries_what_was_refused(four: Pool):
    """The advice for int64 works."""
    for rank, (dtype, values) in enumerate(four.run(carried_with_x64)):
        assert dtype == np.int64
        assert values == [2**40 + 2 * rank, 2**40 + 2 * rank + 1]


def redistributed_partial() -> float:
    partial = DTensor.from_local(torch.ones(8), mesh_of(4), [Partial()])
    return float(jnp.sum(dtensor_to_array(partial.redistribute(placements=[Shard(0)]))))


def test_redistribution_carries_what_was_refused(four: Pool):
    """The advice for Partial works."""
    assert four.run(redistributed_partial) == [32.0] * 4


def own_devices() -> list[Any]:
    return [
        [device for device in jax.devices() if device.process_index == rank]
        for rank in range(dist.get_world_size())
    ]


def on_mesh(devices: Any, names: Any, spec: PartitionSpec) -> jax.Array:
    sharding = NamedSharding(Mesh(np.array(devices), names), spec)
    return jax.make_array_from_callback((8,), sharding, lambda index: np.arange(8.0)[index])


def several_per_process() -> str:
    return raised(array_to_dtensor, on_mesh(own_devices(), ("p", "d"), P("p")))


def not_on_a_mesh() -> str:
    return raised(array_to_dtensor, jnp.ones(2))


def of_other_ranks() -> str:
    array = on_mesh([devices[0] for devices in reversed(own_devices())], ("a",), P("a"))
    return raised(array_to_dtensor, array, mesh_of(2))


def deleted() -> str:
    array = dtensor_to_array(distributed((2,), [Shard(0)], (8,), "float32")).copy()
    array.delete()
    return raised(array_to_dtensor, array)


def random_key() -> str:
    mesh = Mesh(np.array([devices[0] for devices in own_devices()]), ("a",))
    split = jax.jit(
        lambda: jax.random.split(jax.random.key(0)), out_shardings=NamedSharding(mesh, P())
    )
    return raised(array_to_dtensor, split())


def tracer() -> str:
    return raised(jax.jit(array_to_dtensor), jnp.ones(2))


def dtype_without_counterpart() -> str:
    array = on_mesh([devices[0] for devices in own_devices()], ("a",), P("a"))
    return raised(array_to_dtensor, array.astype(jnp.int4), mesh_of(2))


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (several_per_process, "with several devices of one process, where torch has one per rank"),
        (not_on_a_mesh, "a SingleDeviceSharding: put it on a mesh first, jax.device_put("),
        (
            of_other_ranks,
            "over the ranks [1, 0] and a device_mesh of the ranks [0, 1]: pass one of",
        ),
        (deleted, "got an array that was deleted or donated."),
        (random_key, "got a typed PRNG key: pass jax.random.key_data(key)."),
        (tracer, "got a tracer: convert outside of jit"),
        (dtype_without_counterpart, "got dtype int4, which torch does not have"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_array_that_no_dtensor_can_hold_raises_on_every_rank(two: Pool, job: Any, message: str):
    """The error says what was got and what to do."""
    for error in two.run(job):
        assert error.startswith("LeafTypeError: ")
        assert message in error
