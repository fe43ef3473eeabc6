"""One DTensor <-> one jax.Array over the processes of a job; the local shards share memory."""

from collections.abc import Callable
from typing import Any

import jax
import torch
import torch.distributed as dist
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from tdbridge.convert.copies import shareable
from tdbridge.convert.dlpack import arrays_to_tensors, tensors_to_arrays
from tdbridge.convert.narrowing import check_narrow
from tdbridge.convert.sharding import to_named_sharding, to_placements
from tdbridge.convert.sharding_mesh import known_mesh, ranks_of
from tdbridge.convert.sharing import narrowed_dtype, why_not_to_jax, why_not_to_torch
from tdbridge.errors import LeafTypeError
from tdbridge.layout.dtensors import local_shard
from tdbridge.layout.dtypes import dtype_of
from tdbridge.pytrees.prng import is_key

# --- torch -> JAX


def dtensor_to_array(dtensor: DTensor) -> jax.Array:
    """Converts a DTensor to a global array: the same box in each process, sharing its memory.

    No communication, but all ranks of the mesh have to do it before they compute with the array.
    The local shard shares memory under the conditions of `tdbridge.to_jax`, and is copied once
    where it cannot. It is detached from autograd.

    Args:
        dtensor: of any shape and of a dtype that JAX keeps, in a job where JAX runs beside
            torch.distributed (`tdbridge.distributed.initialize_jax`).

    Returns:
        An array of the DTensor's shape with the NamedSharding of its placements, committed to it.
        On a rank outside of the mesh it has no shards.

    Raises:
        LeafTypeError: a placement that JAX cannot spell (Partial), an uneven shard, JAX in this
            process alone, or a dtype that cannot cross. Each says what to do, and the decision
            depends on nothing that differs between ranks: all of them raise, or none.
        NarrowingError: float64 or complex128 while x64 is off.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
        >>> dtensor = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])
        >>> array = dtensor_to_array(dtensor)
        >>> array.shape, array.sharding.spec
        ((8, 3), P('data',))
        >>> dist.destroy_process_group()
    """
    if (reason := why_not_global(dtensor)) is not None:
        raise LeafTypeError(f"got {reason}.")
    shards = [local_shard(dtensor)]
    check_narrow(lambda: [()], shards, "exact")
    return global_array(dtensor, tensors_to_arrays(shareable(shards))[0])


def why_not_global(dtensor: DTensor) -> str | None:
    """Why a DTensor cannot become a global array, or None when it can. The same on every rank."""
    if (reason := why_not_to_jax(local_shard(dtensor))) is not None:
        return reason
    if narrowed_dtype(dtensor.dtype) in ("int32", "uint32"):
        return (
            f"a DTensor of {dtensor.dtype} while x64 is off, and no rank alone knows whether all "
            "its values fit in 32 bits: turn x64 on, or cast it in torch first"
        )
    return _reason(to_named_sharding, dtensor)


def _reason(check: Callable[..., object], *args: object) -> str | None:
    try:
        check(*args)
    except LeafTypeError as error:
        return str(error).removeprefix("got ").removesuffix(".")
    return None


def global_array(dtensor: DTensor, shard: jax.Array) -> jax.Array:
    """The global array of a DTensor, over an array of its local shard. Copies nothing."""
    shards = [shard] if dtensor.device_mesh.get_coordinate() is not None else []
    return jax.make_array_from_single_device_arrays(
        tuple(dtensor.shape), to_named_sharding(dtensor), shards, dtype=shard.dtype
    )


# --- JAX -> torch


def array_to_dtensor(array: jax.Array, device_mesh: DeviceMesh | None = None) -> DTensor:
    """Converts a global array with one shard per process to a DTensor, its local shard shared.

    No communication. Waits until this process's shard is computed. The local tensor is WRITABLE
    although JAX takes the array for constant.

    Args:
        array: with a NamedSharding over at most one device of each process, in a job where rank r
            is JAX's process r.
        device_mesh: the same ranks as the mesh of the array, in the same shape. None takes the one
            that the array's mesh was made from (`jax_mesh`, or the DTensor that became an array),
            or that was made from it (`torch_mesh`), while it lives.

    Returns:
        A DTensor of the same shape and dtype, without grad.

    Raises:
        LeafTypeError: no DTensor can hold the array; the error says what to do.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
        >>> array = dtensor_to_array(distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])) * 2
        >>> array_to_dtensor(array).placements
        (Shard(dim=0),)
        >>> dist.destroy_process_group()
    """
    if (reason := why_not_dtensor(array, device_mesh)) is not None:
        raise LeafTypeError(f"got {reason}.")
    mesh, placements = _target(array, device_mesh)
    shards = [shard.data for shard in array.addressable_shards]
    if shards:
        return DTensor.from_local(arrays_to_tensors(shards)[0], mesh, placements)
    outside = torch.empty(0, dtype=dtype_of(array.dtype).in_torch, device=mesh.device_type)
    stride = torch.empty(array.shape, device="meta").stride()
    return DTensor.from_local(
        outside, mesh, placements, shape=torch.Size(array.shape), stride=stride
    )


def becomes_dtensor(array: Any) -> bool:
    """Whether a leaf is to torch what a DTensor is, and no plain tensor.

    It is when it lies on the mesh of a DTensor that became an array, or on one that `torch_mesh`
    knows; and when this process has only a part of it, while torch.distributed runs.
    """
    if not isinstance(array, jax.Array) or isinstance(array, Tracer) or not dist.is_initialized():
        return False
    if known_mesh(getattr(array.sharding, "mesh", None)) is not None:
        return True
    return not (array.is_fully_addressable or array.is_fully_replicated)


def why_not_dtensor(array: jax.Array, device_mesh: DeviceMesh | None = None) -> str | None:
    """Why an array cannot become a DTensor, or None when it can."""
    if isinstance(array, Tracer) or array.is_deleted():
        return why_not_to_torch(array)
    if is_key(array):
        return "a typed PRNG key: pass jax.random.key_data(key)"
    for shard in array.addressable_shards[:1]:
        if (reason := why_not_to_torch(shard.data)) is not None:
            return reason
    return _reason(_target, array, device_mesh)


def _target(
    array: jax.Array, device_mesh: DeviceMesh | None
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The mesh and the placements of the DTensor that holds what `array` holds."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        raise LeafTypeError(
            f"got an array with a {type(sharding).__name__}: put it on a mesh first, "
            "jax.device_put(array, NamedSharding(mesh, spec)), or give jit such out_shardings."
        )
    over: Any = sharding.mesh  # of an array: a Mesh, never an AbstractMesh
    mesh = known_mesh(over) if device_mesh is None else _matching(device_mesh, over)
    if mesh is None:
        ranks_of(over)  # raises where no DeviceMesh could be
        raise LeafTypeError(
            f"got an array over {over}, of which no DeviceMesh is known: pass device_mesh=, or "
            "call tdbridge.convert.sharding.torch_mesh(array.sharding.mesh) once on all ranks and "
            "keep the result."
        )
    return mesh, to_placements(sharding.spec, over.shape)


def _matching(device_mesh: DeviceMesh, over: Mesh) -> DeviceMesh:
    given, ranks = device_mesh.mesh.tolist(), ranks_of(over).tolist()
    if given != ranks:
        raise LeafTypeError(
            f"got an array over the ranks {ranks} and a device_mesh of the ranks {given}: pass one "
            "of the same ranks, or reshard the array."
        )
    return device_mesh
