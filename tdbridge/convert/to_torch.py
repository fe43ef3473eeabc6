"""JAX -> torch."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer

from tdbridge.convert.dlpack import arrays_to_tensors, numpy_to_tensor
from tdbridge.convert.dtensor import array_to_dtensor, becomes_dtensor, why_not_dtensor
from tdbridge.convert.leaves import replace_some, take_apart
from tdbridge.convert.sharing import (
    Paths,
    all_on_one_device,
    refuse,
    refuse_copies,
    why_not_to_torch,
    why_numpy_copied,
)
from tdbridge.layout.tree import rebuild


def to_torch(tree: Any, *, copy: bool | None = None, device: Any = None) -> Any:
    """Converts every array of `tree` to a torch tensor; ArrayDicts become TensorDicts.

    A tensor shares memory with an array that lies on one device. The tensor is WRITABLE although
    JAX takes the array for constant: an in-place operation in torch changes the array, and every
    other array and tensor over that memory. Pass `copy=True` for tensors to write to. Waits until
    the arrays are computed.

    An array over the processes of the job becomes a DTensor, its local shard shared: see
    docs/sharding.md.

    Args:
        tree: an ArrayDict, or any pytree with jax arrays, numpy arrays or ArrayDicts in it.
            Tensors and everything else in it stay as they are.
        copy: None shares where possible; False raises where a leaf would be copied (an array
            over several devices, a read-only or negatively strided numpy array); True copies.
        device: a torch device to move the tensors to.

    Returns:
        The same tree with tensors, and TensorDicts or tensorclasses in the place of ArrayDicts.
        Keys, batch sizes, names and non-tensor entries are kept.

    Raises:
        LeafTypeError: leaves that cannot be carried (tracers, deleted arrays, PRNG keys, dtypes
            that torch lacks). Lists every such leaf, before anything is converted.
        CopyError: `copy=False` and leaves that cannot be shared.

    Example:
        >>> import jax.numpy as jnp
        >>> from tdbridge import ArrayDict
        >>> ad = ArrayDict({"x": jnp.ones((4, 3))}, [4])
        >>> td = to_torch(ad)
        >>> td["x"].data_ptr() == ad["x"].unsafe_buffer_pointer(), td.batch_size
        (True, torch.Size([4]))
    """
    if copy is not None and not isinstance(copy, bool):
        raise ValueError(f"copy is None, True or False, got {copy!r}.")
    if copy is False and device is not None:
        raise ValueError("copy=False shares memory where it is: it goes with no device.")
    parts = take_apart(tree)

    def convert(leaves: list[Any], paths: Paths) -> Sequence[torch.Tensor]:
        tensors = _convert(leaves, paths, copy)
        return tensors if device is None else [tensor.to(device) for tensor in tensors]

    return parts.put_together(replace_some(parts, crosses_to_torch, convert), rebuild)


def crosses_to_torch(kind: type, loose: bool) -> bool:
    """Every array, and whatever else a tensordict holds: it could not stay there."""
    if issubclass(kind, torch.Tensor):
        return False
    return not loose or issubclass(kind, (jax.Array, np.ndarray, Tracer))


def _convert(arrays: Sequence[Any], paths: Paths, copy: bool | None) -> list[torch.Tensor]:
    if all_on_one_device(arrays):
        tensors = arrays_to_tensors(arrays)
        return [tensor.clone() for tensor in tensors] if copy else tensors
    refuse(paths, [*map(why_refused_to_torch, arrays)], "to_torch")
    reasons = [why_copied_to_torch(array) for array in arrays]
    if copy is False:
        refuse_copies(paths, reasons, "Use copy=None.")
    return [
        _convert_one(array, copied=reason is not None, copy=copy)
        for array, reason in zip(arrays, reasons, strict=True)
    ]


def why_refused_to_torch(array: Any) -> str | None:
    """Why `to_torch` cannot carry a leaf, or None when it can."""
    return why_not_dtensor(array) if becomes_dtensor(array) else why_not_to_torch(array)


def why_copied_to_torch(array: Any) -> str | None:
    """Why `to_torch` copies a leaf that it carries, or None when the tensor shares its memory."""
    if not isinstance(array, jax.Array):
        return why_numpy_copied(np.asarray(array))
    if array.is_fully_replicated or becomes_dtensor(array):  # whole here, or its shard here is
        return None
    return f"it is split over {len(array.sharding.device_set)} devices"


def _convert_one(array: Any, *, copied: bool, copy: bool | None) -> torch.Tensor:
    if not isinstance(array, jax.Array):
        tensor = numpy_to_tensor(array)
    elif becomes_dtensor(array):
        tensor = array_to_dtensor(array)
    elif copied:
        tensor = numpy_to_tensor(np.asarray(array))
    else:
        (tensor,) = arrays_to_tensors([array.addressable_data(0)])
    return tensor.clone() if copy and not copied else tensor
