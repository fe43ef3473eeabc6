"""JAX -> torch."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer

from tdbridge.convert.aliasing import Switch, follow
from tdbridge.convert.dlpack import arrays_to_tensors, numpy_to_tensor, tensors_at_once
from tdbridge.convert.dtensor import array_to_dtensor, becomes_dtensor, why_not_dtensor
from tdbridge.convert.leaves import replace_some, take_apart
from tdbridge.convert.like import dtype_like, leaves_like, why_cast, why_not_like
from tdbridge.convert.sharing import (
    Paths,
    refuse,
    refuse_copies,
    why_not_to_torch,
    why_numpy_copied,
)
from tdbridge.errors import LeafTypeError
from tdbridge.layout.spec import Path
from tdbridge.layout.tree import rebuild
from tdbridge.pytrees.prng import PRNGKey, impl_of, is_key


def to_torch(tree: Any, *, copy: bool | None = None, device: Any = None, like: Any = None) -> Any:
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
        like: a tree with the same paths, of anything that has a dtype: tensors, arrays,
            ShapeDtypeStructs. Each tensor gets the dtype of the leaf at its path, which brings back
            the 64-bit dtypes that `to_jax` narrowed. Shapes may differ. Only casts that change no
            value are made, and each of them is a copy.

    Returns:
        The same tree with tensors, and TensorDicts or tensorclasses in the place of ArrayDicts.
        Keys, batch sizes, names and non-tensor entries are kept.

    Raises:
        LeafTypeError: leaves that cannot be carried (tracers, deleted arrays, dtypes that torch
            lacks), or whose values the dtype in `like` does not hold exactly. Lists
            every such leaf, before anything is converted.
        LayoutError: `like` has other paths; it lists them.
        CopyError: `copy=False` and leaves that cannot be shared.

    Example:
        >>> import jax.numpy as jnp
        >>> from tdbridge import ArrayDict
        >>> ad = ArrayDict({"x": jnp.ones((4, 3))}, [4])
        >>> td = to_torch(ad)
        >>> td["x"].data_ptr() == ad["x"].unsafe_buffer_pointer(), td.batch_size
        (True, torch.Size([4]))
        >>> to_torch({"n": jnp.arange(3)}, like={"n": torch.arange(8)})["n"].dtype
        torch.int64
    """
    if copy is not None and not isinstance(copy, bool):
        raise ValueError(f"copy is None, True or False, got {copy!r}.")
    if copy is False and device is not None:
        raise ValueError("copy=False shares memory where it is: it goes with no device.")
    parts = take_apart(tree)
    wanted = {} if like is None else leaves_like(parts, like)

    def convert(leaves: list[Any], paths: Paths) -> Sequence[torch.Tensor]:
        targets = [wanted[path] for path in paths()] if wanted else None
        tensors = _convert(leaves, paths, copy, targets)
        return tensors if device is None else [tensor.to(device) for tensor in tensors]

    def target(path: Path) -> Any:
        with suppress(LeafTypeError):  # `why_not_like` says it
            return dtype_like(wanted[path])

    new = replace_some(parts, crosses_to_torch, convert, target if wanted else None)
    if Switch.on:
        follow(parts.paths, parts.leaves, new)
    return parts.put_together(new, rebuild)


def crosses_to_torch(kind: type, loose: bool) -> bool:
    """Every array, and whatever else a tensordict holds: it could not stay there."""
    if issubclass(kind, torch.Tensor):
        return False
    return not loose or issubclass(kind, (jax.Array, np.ndarray, Tracer))


def _convert(
    arrays: Sequence[Any], paths: Paths, copy: bool | None, likes: Sequence[Any] | None
) -> list[torch.Tensor]:
    # Whether an array is still read is known by whether it lives.
    tensors = tensors_at_once(arrays, by_view=not Switch.on)
    if tensors is not None and likes is None:
        return [tensor.clone() for tensor in tensors] if copy else tensors
    likes = [None] * len(arrays) if likes is None else likes
    refuse(paths, [*map(why_refused_to_torch, arrays, likes)], "to_torch")
    if copy is False:
        refuse_copies(paths, [*map(why_copied_to_torch, arrays, likes)], "Use copy=None.")
    tensors = tensors or map(_convert_one, arrays)
    return [*map(_finished, tensors, arrays, likes, [copy] * len(arrays))]


def why_refused_to_torch(array: Any, like: Any = None) -> str | None:
    """Why `to_torch` cannot carry a leaf, or not in the dtype of `like`, or None when it can."""
    reason = why_not_dtensor(array) if becomes_dtensor(array) else why_not_to_torch(array)
    return reason if reason or like is None else why_not_like(array, like)


def why_copied_to_torch(array: Any, like: Any = None) -> str | None:
    """Why `to_torch` copies a leaf that it carries, or None when the tensor shares its memory."""
    return _why_own_memory(array) or (None if like is None else why_cast(array, like))


def _why_own_memory(array: Any) -> str | None:
    if not isinstance(array, jax.Array):
        return why_numpy_copied(np.asarray(array))
    if array.is_fully_replicated or becomes_dtensor(array):  # whole here, or its shard here is
        return None
    return f"it is split over {len(array.sharding.device_set)} devices"


def _convert_one(array: Any) -> Any:
    if is_key(array):
        data = _convert_one(jax.random.key_data(array))
        return PRNGKey(key_data=data, impl=impl_of(array), batch_size=array.shape)
    if not isinstance(array, jax.Array):
        return numpy_to_tensor(array)
    if becomes_dtensor(array):
        return array_to_dtensor(array)
    if _why_own_memory(array) is not None:
        return numpy_to_tensor(np.asarray(array))
    return arrays_to_tensors([array.addressable_data(0)])[0]


def _finished(tensor: torch.Tensor, array: Any, like: Any, copy: bool | None) -> torch.Tensor:
    """In the dtype of `like`, and copied if that was asked for and has not happened yet."""
    if like is not None and why_cast(array, like) is not None:
        return tensor.to(dtype_like(like))
    return tensor.clone() if copy and _why_own_memory(array) is None else tensor
