"""JAX -> torch."""

from typing import Any

import jax
import numpy as np
import torch

from tdbridge.convert.dlpack import array_to_tensor, numpy_to_tensor
from tdbridge.convert.leaves import Leaf, take_apart
from tdbridge.convert.sharing import refuse, refuse_copies, why_not_to_torch
from tdbridge.layout.tree import rebuild


def to_torch(tree: Any, *, copy: bool | None = None, device: Any = None) -> Any:
    """Converts every array of `tree` to a torch tensor; ArrayDicts become TensorDicts.

    A tensor shares memory with an array that lies on one device. The tensor is WRITABLE although
    JAX takes the array for constant: an in-place operation in torch changes the array, and every
    other array and tensor over that memory. Pass `copy=True` for tensors to write to. Waits until
    the arrays are computed.

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
    if copy not in (None, True, False):
        raise ValueError(f"copy is None, True or False, got {copy!r}.")
    if copy is False and device is not None:
        raise ValueError("copy=False shares memory where it is: it goes with no device.")
    leaves, put_together = take_apart(tree)
    new = [leaf.value for leaf in leaves]
    at = [i for i, leaf in enumerate(leaves) if _crosses(leaf)]
    refuse(((leaves[i].path, why_not_to_torch(new[i])) for i in at), "to_torch")
    copies = [_why_copied(new[i]) for i in at]
    if copy is False:
        refuse_copies((leaves[i].path, why) for i, why in zip(at, copies, strict=True))
    jax.block_until_ready([new[i] for i in at])
    for i, why in zip(at, copies, strict=True):
        tensor = _convert(new[i], copied=why is not None, copy=copy)
        new[i] = tensor if device is None else tensor.to(device)
    return put_together(new, rebuild)


def _crosses(leaf: Leaf) -> bool:
    """Every array, and whatever else a tensordict holds: it could not stay there."""
    if isinstance(leaf.value, torch.Tensor):
        return False
    return leaf.in_node or isinstance(leaf.value, (jax.Array, np.ndarray))


def _why_copied(array: jax.Array | np.ndarray) -> str | None:
    """Why the tensor cannot share the memory of `array`, or None when it can."""
    if isinstance(array, jax.Array):
        if array.is_fully_replicated:  # on one device, or whole on each of several
            return None
        return f"it is split over {len(array.sharding.device_set)} devices"
    if not array.flags.writeable:
        return "it is read-only"
    if any(stride < 0 for stride in array.strides):
        return f"it has negative strides {array.strides}"
    return None if array.dtype.isnative else f"its byte order is {array.dtype.byteorder!r}"


def _convert(array: jax.Array | np.ndarray, *, copied: bool, copy: bool | None) -> torch.Tensor:
    if isinstance(array, np.ndarray):
        tensor = numpy_to_tensor(array)
    elif copied:
        tensor = numpy_to_tensor(np.asarray(array))
    else:
        tensor = array_to_tensor(array.addressable_data(0))
    return tensor.clone() if copy and not copied else tensor
