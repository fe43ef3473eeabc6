"""DTensors and arrays that are made in less usual ways."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tdbridge.convert.dtensor import array_to_dtensor, dtensor_to_array
from tdbridge.convert.sharding import jax_mesh, to_named_sharding, torch_mesh
from tests import zoo
from tests.multiprocess.jobs import distributed, mesh_of, only_shard, raised
from tests.multiprocess.pool import Pool

pytestmark = pytest.mark.xdist_group("multiprocess")

P = PartitionSpec


def shard_of(local: torch.Tensor) -> Any:
    """(Values of this rank's shard, whether it shares memory with the DTensor's)."""
    array = dtensor_to_array(DTensor.from_local(local, mesh_of(2), [Shard(0)]))
    shard = only_shard(array).data
    return np.asarray(shard), shard.unsafe_buffer_pointer() == local.data_ptr(), array.shape


def plain_shard() -> Any:
    return shard_of(torch.arange(6.0))


def transposed_shard() -> Any:
    return shard_of(torch.arange(6.0).reshape(3, 2).t())


def unaligned_shard() -> Any:
    return shard_of(torch.arange(9.0)[1:])


def conjugate_shard() -> Any:
    return shard_of(torch.tensor([1 + 2j, 3 - 4j]).conj())


@pytest.mark.parametrize(
    ("job", "values", "shared"),
    [
        (transposed_shard, np.arange(6.0).reshape(3, 2).T, False),
        (plain_shard, np.arange(6.0), True),
        (unaligned_shard, np.arange(1.0, 9.0), False),
        (conjugate_shard, np.array([1 - 2j, 3 + 4j]), False),
    ],
)
def test_local_shards_follow_the_rules_of_plain_tensors(
    two: Pool, job: Any, values: np.ndarray, shared: bool
):
    """A shard that is aligned and contiguous is shared; any other one is copied."""
    shape = (2 * values.shape[0], *values.shape[1:])
    for got, is_shared, got_shape in two.run(job):
        np.testing.assert_array_equal(got, values)
        assert is_shared is shared
        assert got_shape == shape


def parameter() -> Any:
    weight: Any = torch.nn.Parameter(distributed((2,), [Shard(0)], (4, 2), "float32"))
    array = dtensor_to_array(weight)
    back = array_to_dtensor(array)
    return float(jnp.sum(array)), weight.requires_grad, back.requires_grad


def test_a_parameter_is_detached(two: Pool):
    """A DTensor that requires gradients crosses without its graph, and keeps it in torch."""
    expected = float(zoo.as_numpy(zoo.pattern("float32", 4, 2)).sum())
    assert two.run(parameter) == [(expected, True, False)] * 2


def redistributed() -> Any:
    dtensor = distributed((2,), [Shard(0)], (4, 2), "float32")
    pending = dtensor.redistribute(placements=[Replicate()], async_op=True)
    return np.asarray(only_shard(dtensor_to_array(pending)).data)


def test_a_redistribution_under_way_is_awaited(two: Pool):
    """What `redistribute(async_op=True)` gives is read when it has arrived."""
    for values in two.run(redistributed):
        np.testing.assert_array_equal(values, zoo.as_numpy(zoo.pattern("float32", 4, 2)))


def without_names() -> Any:
    mesh = init_device_mesh("cpu", (2,))
    array: Any = dtensor_to_array(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    return array.sharding.spec, array_to_dtensor(array).device_mesh is mesh


def test_a_mesh_without_names(two: Pool):
    """Its axes are named by their position, and the DTensor comes back on the same mesh."""
    assert two.run(without_names) == [(P("mesh_dim_0"), True)] * 2


def outside_of_the_mesh() -> Any:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",))
    array = dtensor_to_array(distribute_tensor(zoo.pattern("int32", 4, 3), mesh, [Shard(0)]))
    back = array_to_dtensor(array)
    shards = [np.asarray(shard.data) for shard in array.addressable_shards]
    return array.shape, array.dtype, shards, back.shape, back.dtype, zoo.as_numpy(back.to_local())


def test_ranks_outside_of_the_mesh_hold_nothing(four: Pool):
    """They too have the array and the DTensor, without a shard, and nobody waits for them."""
    whole = zoo.as_numpy(zoo.pattern("int32", 4, 3))
    for rank, (*array, shards, shape, dtype, local) in enumerate(four.run(outside_of_the_mesh)):
        assert array == [(4, 3), np.int32]
        assert (shape, dtype) == ((4, 3), torch.int32)
        assert [part.tolist() for part in shards] == ([whole[2 * rank :][:2].tolist()] * (rank < 2))
        assert local.tolist() == (whole[2 * rank :][:2].tolist() if rank < 2 else [])


def fsdp_and_tensor_parallel() -> Any:
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(4, 8)
    expected = {name: zoo.as_numpy(weight) for name, weight in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    found = {}
    for name, weight in model.named_parameters():
        array: Any = dtensor_to_array(weight)
        shard = only_shard(array)
        same = np.array_equal(np.asarray(shard.data), expected[name][shard.index])
        found[name] = array.sharding.spec, same, float(jnp.sum(array)), expected[name].sum()
    return found


def test_fsdp_over_tensor_parallelism(four: Pool):
    """A model that torch itself shards that way: each parameter is P(('tp', 'dp'))."""
    for found in four.run(fsdp_and_tensor_parallel):
        assert found.keys() == {"weight", "bias"}
        for spec, same, total, expected in found.values():
            assert spec == P(("tp", "dp"))
            assert same
            assert total == pytest.approx(float(expected), rel=1e-5)


# --- arrays that JAX made


def made_by_jax(*names: str, shape: tuple[int, ...] = (2,)) -> jax.Array:
    """An array of 8 floats over one device of each process: the last one, not the first."""
    ranks = range(dist.get_world_size())
    own = [[d for d in jax.devices() if d.process_index == rank][-1] for rank in ranks]
    sharding = NamedSharding(Mesh(np.array(own).reshape(shape), names), P(names))
    return jax.make_array_from_callback((8,), sharding, lambda index: np.arange(8.0)[index])


def over_a_new_mesh() -> Any:
    array: Any = made_by_jax("x", "y", shape=(2, 2))
    unknown = raised(array_to_dtensor, array)
    mesh = torch_mesh(array.sharding.mesh)
    back = array_to_dtensor(array)
    shared = back.to_local().data_ptr() == only_shard(array).data.unsafe_buffer_pointer()
    return (
        unknown,
        mesh.mesh_dim_names,
        back.placements,
        back.device_mesh is mesh,
        shared,
        back.full_tensor().tolist(),
    )


def test_an_array_over_a_mesh_that_jax_made(four: Pool):
    """Without a DeviceMesh it is an error, not a hidden collective; `torch_mesh` makes one."""
    for unknown, names, placements, same, shared, values in four.run(over_a_new_mesh):
        assert "of which no DeviceMesh is known: pass device_mesh=, or call" in unknown
        assert names == ("x", "y")
        assert placements == (Shard(0), Shard(0))
        assert same
        assert shared
        assert values == list(range(8))


def with_device_mesh() -> Any:
    array = made_by_jax("x")
    back = array_to_dtensor(array, mesh_of(2))
    return back.device_mesh is mesh_of(2), back.full_tensor().tolist()


def test_the_mesh_that_is_passed_is_used(two: Pool):
    """device_mesh= needs the same ranks in the same shape, not the same names."""
    assert two.run(with_device_mesh) == [(True, list(range(8)))] * 2


def named_sharding() -> Any:
    dtensor = distributed((2, 2), [Shard(1), Replicate()], (4, 4), "float32")
    sharding: Any = to_named_sharding(dtensor)
    ranks = [device.process_index for device in sharding.mesh.devices.flat]
    firsts = [min(d.id for d in jax.devices() if d.process_index == r) for r in ranks]
    ids = [device.id for device in sharding.mesh.devices.flat]
    return (
        sharding.spec,
        sharding.mesh.axis_names,
        ranks,
        ids == firsts,
        jax_mesh(mesh_of(2, 2)) == sharding.mesh,
    )


def test_the_mesh_in_jax_has_the_first_device_of_each_rank(four: Pool):
    """Shape, names and order of the ranks are those of the DeviceMesh."""
    expected = (P(None, "a"), ("a", "b"), [0, 1, 2, 3], True, True)
    assert four.run(named_sharding) == [expected] * 4
