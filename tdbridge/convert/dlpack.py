"""One tensor <-> one array, memory shared. What can be shared is decided in `sharing`."""

from collections.abc import Sequence

import jax
import numpy as np
import torch

from tdbridge._compat.jax import dlpack_sources, put, uncommitted
from tdbridge._compat.torch import import_all
from tdbridge.convert.sharing import why_numpy_copied
from tdbridge.layout.dtypes import TABLE, dtype_of

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


def arrays_to_tensors(arrays: Sequence[jax.Array]) -> list[torch.Tensor]:
    """One tensor per array, on its one device, sharing its memory; waits until all are computed."""
    jax.block_until_ready(arrays)
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
