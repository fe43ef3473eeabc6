"""One tensor <-> one array, memory shared. What can be shared is decided in `sharing`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from tdbridge._compat.jax import dlpack_source, put, uncommitted
from tdbridge.layout.dtypes import dtype_of

# numpy has no dtype for these without ml_dtypes: they cross as integers of the same width.
_CARRIER = {1: torch.uint8, 2: torch.int16}


def numpy_view(tensor: torch.Tensor) -> np.ndarray:
    """A numpy array over the memory of a CPU tensor; the storage can no longer be resized.

    `Tensor.numpy()` pins the storage: a later `resize_` raises instead of leaving JAX on freed
    memory. The array keeps the detached tensor alive, so that `set_` and `.data =` do no harm.
    """
    dtype = dtype_of(tensor.dtype).in_numpy
    if dtype.isbuiltin == 1:
        return tensor.numpy()
    carrier = tensor.view(_CARRIER[tensor.element_size()])
    return carrier.numpy().view(dtype)


def tensors_to_arrays(tensors: Sequence[torch.Tensor]) -> list[jax.Array]:
    """One uncommitted array per tensor, on its device, sharing its memory.

    Args:
        tensors: detached, dense, aligned, with no conjugate or negative bit, of dtypes that JAX
            keeps.
    """
    device = jax.devices("cpu")[0]
    plain = [i for i, t in enumerate(tensors) if t.device.type == "cpu" and t.is_contiguous()]
    arrays: list[Any] = [None] * len(tensors)
    for i, array in zip(plain, put([numpy_view(tensors[i]) for i in plain], device), strict=True):
        arrays[i] = array
    for i, tensor in enumerate(tensors):
        if arrays[i] is None:
            arrays[i] = _by_dlpack(tensor)
    return arrays


def _by_dlpack(tensor: torch.Tensor) -> jax.Array:
    """Other devices, and dense tensors whose dimensions are permuted: JAX keeps the layout."""
    if tensor.device.type == "cpu":
        numpy_view(tensor)  # pins the storage, which DLPack does not
    return uncommitted(jax.dlpack.from_dlpack(tensor))


def array_to_tensor(array: jax.Array) -> torch.Tensor:
    """A tensor over the memory of an array on one device, which has been computed."""
    return from_dlpack(dlpack_source(array))


def numpy_to_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor over the memory of a numpy array, or over a copy where torch cannot take it.

    torch knows no negative strides (`torch.from_dlpack` ends the process), no foreign byte order,
    and no read-only memory.
    """
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if not native.flags.writeable or any(s < 0 for s in native.strides):
        native = native.copy()
    dtype = dtype_of(native.dtype)
    if dtype.in_numpy.isbuiltin == 1:
        return torch.from_numpy(native)
    native = np.ascontiguousarray(native).reshape(array.shape)
    carrier = {1: np.uint8, 2: np.int16}[dtype.itemsize]
    return torch.from_numpy(native.view(carrier)).view(dtype.in_torch)


def shares_memory(tensor: torch.Tensor, array: jax.Array) -> bool:
    """Whether both start at the same address."""
    return tensor.numel() == 0 or tensor.data_ptr() == array.unsafe_buffer_pointer()
