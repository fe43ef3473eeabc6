"""DeviceMesh <-> jax Mesh: ranks on one side, devices on the other.

Rank r and JAX's process r are one process, and torch knows one device in each. In JAX a process may
have several (virtual CPU devices, say): the first one stands for the rank.
"""

from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import numpy as np
import torch.distributed as dist
from jax.sharding import Mesh
from torch.distributed.device_mesh import DeviceMesh

from tdbridge.errors import LeafTypeError

_PLATFORMS = {"cuda": "gpu"}
_DEVICE_TYPES = {"gpu": "cuda", "cuda": "cuda", "rocm": "cuda"}

# Making a DeviceMesh is collective, which a conversion must not be: so a Mesh goes back to the
# DeviceMesh that it was made from, or that was made from it, while somebody holds that.
_known: WeakValueDictionary[Mesh, DeviceMesh] = WeakValueDictionary()
# Reading the ranks of a DeviceMesh and making a Mesh take 0.1 ms, for every leaf of a tree.
_made: WeakKeyDictionary[DeviceMesh, Mesh] = WeakKeyDictionary()


def axes_of(device_mesh: DeviceMesh) -> dict[str, int]:
    """The name and the size of each axis. Axes without names get `mesh_dim_0`, `mesh_dim_1`, ..."""
    names = device_mesh.mesh_dim_names or [f"mesh_dim_{i}" for i in range(device_mesh.ndim)]
    return dict(zip(names, device_mesh.shape, strict=True))


def jax_mesh(device_mesh: DeviceMesh) -> Mesh:
    """The mesh of the first JAX device of each rank's process, with the same shape and axis names.

    `array_to_dtensor` finds `device_mesh` for it, as long as something holds that.

    Args:
        device_mesh: any mesh of ranks, also a slice of a larger one, or one without this rank.

    Raises:
        LeafTypeError: JAX runs in this process alone, or numbers the processes otherwise.
    """
    _check_job()
    if (mesh := _made.get(device_mesh)) is None:
        mesh = _made[device_mesh] = _mesh_over(device_mesh)
    _known[mesh] = device_mesh
    return mesh


def _mesh_over(device_mesh: DeviceMesh) -> Mesh:
    first: dict[int, Any] = {}
    for device in jax.devices(_PLATFORMS.get(device_mesh.device_type, device_mesh.device_type)):
        first.setdefault(device.process_index, device)
    devices = np.vectorize(first.__getitem__, otypes=[object])(device_mesh.mesh.numpy())
    return Mesh(devices, tuple(axes_of(device_mesh)))


def _check_job() -> None:
    """Raises unless rank r of torch.distributed is process r of JAX."""
    if not dist.is_initialized():
        raise LeafTypeError(
            "got a mesh without a process group, which was never made or was destroyed: call "
            "torch.distributed.init_process_group() and make the mesh again."
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    # Asking for the process count starts JAX's backend, after which it cannot join the job.
    if world > 1 and not jax.distributed.is_initialized():
        raise LeafTypeError(
            f"got a mesh of ranks while JAX runs alone in this process (rank {rank} of {world}): "
            "call tdbridge.distributed.initialize_jax() right after init_process_group(), before "
            "JAX is used. Or convert plain tensors: dtensor.to_local(), dtensor.full_tensor()."
        )
    index, count = jax.process_index(), jax.process_count()
    if (index, count) != (rank, world):
        raise LeafTypeError(
            f"got a mesh of ranks, where rank {rank} of {world} is JAX's process {index} of "
            f"{count}: number them alike; tdbridge.distributed.initialize_jax() does."
        )


def ranks_of(mesh: Mesh) -> np.ndarray:
    """The rank of each device of a mesh, in the shape of the mesh.

    Raises:
        LeafTypeError: the mesh has several devices of one process, or processes are not ranks.
    """
    _check_job()
    ranks = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    if len(np.unique(ranks)) < ranks.size:
        raise LeafTypeError(
            f"got {mesh} with several devices of one process, where torch has one per rank: "
            "reshard the array to tdbridge.convert.sharding.jax_mesh(device_mesh) first."
        )
    return ranks


def torch_mesh(mesh: Mesh) -> DeviceMesh:
    """Makes the mesh of the ranks of a JAX mesh's devices, with the same shape and axis names.

    Collective, as every DeviceMesh: call it on all ranks of the job, once per mesh, and keep the
    result. As long as it lives, `array_to_dtensor` finds it.

    Args:
        mesh: at most one device of each process.

    Raises:
        LeafTypeError: the mesh has several devices of one process.
    """
    platform = str(mesh.devices.flat[0].platform)
    device_type = _DEVICE_TYPES.get(platform, platform)
    made = DeviceMesh(device_type, ranks_of(mesh), mesh_dim_names=tuple(map(str, mesh.axis_names)))
    _known[mesh] = made
    return made


def known_mesh(mesh: Any) -> DeviceMesh | None:
    """The living DeviceMesh of a jax Mesh, or None, also for what is no mesh. Not collective."""
    return _known.get(mesh)
