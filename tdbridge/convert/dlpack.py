"""One tensor <-> one array, memory shared. What can be shared is decided in `sharing`."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from tdbridge._compat.jax import dlpack_sources, dtypes_of, put, shardings_of, uncommitted
from tdbridge._compat.torch import all_of_plain_type, import_all
from tdbridge.convert.sharing import CARRIED, CARRIED_NUMPY, narrowed_dtype, why_numpy_copied
from tdbridge.layout.dtypes import TABLE, dtype_of
from tdbridge.layout.spec import ALIGNMENT

# numpy has no dtype for these without ml_dtypes: they cross as integers of the same width.
_CARRIERS = {
    row.torch: dtype_of({1: "uint8", 2: "int16"}[row.itemsize])
    for row in TABLE
    if row.crosses and row.in_numpy.isbuiltin != 1
}


def numpy_view(tensor: torch.Tensor) -> np.ndarray:
    """A numpy array over the memory of a CPU tensor; the storage can no longer be resized.

    `Tensor.numpy()` pins the storage: a later `resize_` raises instead of leaving JAX on freed
    memory. The array keeps the detached tensor alive, so that `set_` and `.data =` do no harm.
    """
    carrier = _CARRIERS.get(tensor.dtype)
    if carrier is None:
        return tensor.numpy()
    return tensor.view(carrier.in_torch).numpy().view(dtype_of(tensor.dtype).in_numpy)


def arrays_at_once(leaves: Sequence[Any]) -> list[jax.Array] | None:
    """One uncommitted array per leaf, sharing its memory, where all leaves can be judged at once.

    They can when all are plain tensors on the CPU, aligned and row-major, no two of them at one
    address and none of them empty, of dtypes that JAX keeps. None says nothing of the single leaf:
    ask `sharing` of each.
    """
    if not all_of_plain_type(leaves):
        return None
    dtypes = {*map(_dtype, leaves)}
    if not dtypes <= CARRIED or any(map(narrowed_dtype, dtypes)):
        return None
    view = torch.Tensor.numpy if dtypes.isdisjoint(_CARRIERS) else numpy_view
    try:
        # `data_ptr` and `numpy` raise, or give 0, for whatever is no memory with the values in it:
        # sparse, nested and quantized tensors, those inside of vmap, on the meta device, with a
        # conjugate or negative bit.
        pointers = list(map(torch.Tensor.data_ptr, leaves))
        if any(map(ALIGNMENT.__rmod__, pointers)):  # pointer % ALIGNMENT
            return None
        if 0 in pointers or len({*pointers}) < len(pointers):
            return None
        if not (all(map(_is_cpu, leaves)) and all(map(torch.Tensor.is_contiguous, leaves))):
            return None
        views = list(map(view, map(torch.Tensor.detach, leaves)))
    except (RuntimeError, TypeError):
        return None
    return put(views, jax.local_devices(backend="cpu")[0])


_dtype, _is_cpu = attrgetter("dtype"), attrgetter("is_cpu")


def tensors_to_arrays(tensors: Sequence[torch.Tensor]) -> list[jax.Array]:
    """One uncommitted array per tensor, on its device, sharing its memory.

    Args:
        tensors: detached, C-contiguous, aligned, with no conjugate or negative bit, of dtypes that
            JAX keeps.
    """
    on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    views = list(map(numpy_view, on_cpu))
    arrays = iter(put(views, jax.local_devices(backend="cpu")[0]) if views else ())
    if len(on_cpu) == len(tensors):
        return list(arrays)
    return [
        next(arrays) if t.device.type == "cpu" else uncommitted(jax.dlpack.from_dlpack(t))
        for t in tensors
    ]


def tensors_at_once(arrays: Sequence[Any], *, by_view: bool = True) -> list[torch.Tensor] | None:
    """One tensor per array, sharing its memory, where all arrays can be judged at once.

    They can when each is a concrete jax array on one device, of a dtype that torch has. None says
    nothing of the single array: ask `sharing` of each.

    Args:
        arrays: anything.
        by_view: lets a tensor keep its array alive, and not only the memory of it.
    """
    kinds = {*map(type, arrays)}
    if not all(issubclass(t, jax.Array) and not issubclass(t, Tracer) for t in kinds):
        return None
    if not dtypes_of(arrays) <= CARRIED_NUMPY or jax.process_count() > 1:
        return None
    if not shardings_of(arrays) <= {SingleDeviceSharding}:
        return None
    try:
        return import_all(dlpack_sources(arrays, by_view=by_view))
    except RuntimeError:  # one was deleted
        return None


def arrays_to_tensors(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    """One tensor per array, on its one device, sharing its memory; waits until all are computed."""
    return import_all(dlpack_sources(arrays))


def numpy_to_tensor(array: np.ndarray | np.generic) -> torch.Tensor:
    """A tensor over the memory of a numpy array, or over a copy where torch cannot take it.

    What torch cannot take is said by `sharing.why_numpy_copied`.
    """
    dtype = dtype_of(array.dtype)
    plain = np.asarray(array)
    if why_numpy_copied(plain) is not None:
        plain = plain.astype(dtype.in_numpy)  # always a copy, in native byte order
    carrier = _CARRIERS.get(dtype.torch, dtype)
    return torch.from_numpy(plain.view(carrier.in_numpy)).view(dtype.in_torch)


def shares_memory(tensor: torch.Tensor, array: jax.Array) -> bool:
    """Whether both start at the same address."""
    return tensor.numel() == 0 or tensor.data_ptr() == array.unsafe_buffer_pointer()
