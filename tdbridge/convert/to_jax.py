"""torch -> JAX."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from tdbridge.convert.dlpack import numpy_to_tensor, shares_memory, tensors_to_arrays
from tdbridge.convert.dtensor import global_array, local_shard, why_not_global
from tdbridge.convert.leaves import replace_some, take_apart
from tdbridge.convert.narrowing import Narrow, narrowed
from tdbridge.convert.sharing import (
    Paths,
    all_carried,
    all_shared,
    refuse,
    refuse_copies,
    why_copied,
    why_not_to_jax,
    why_numpy_copied,
)
from tdbridge.pytrees.nodes import arraydict_of


def to_jax(
    tree: Any,
    *,
    copy: bool | None = None,
    device: Any = None,
    sharding: Any = None,
    narrow: Narrow = "exact",
) -> Any:
    """Converts every tensor of `tree` to a jax array; TensorDicts become ArrayDicts.

    On the CPU a leaf shares memory with its tensor when the tensor starts on a multiple of 64
    bytes and is C-contiguous. Then a later in-place write in torch changes the array, and JAX,
    which takes arrays for constant, may or may not see it: do not write to a tensor that JAX still
    reads. Call `share_memory_()` before the conversion: after it, the tensor moves and the array
    stays on the old memory. Everything else is copied once. Leaves are detached from autograd.

    A DTensor becomes an array over the processes of the job, its local shard shared in the same
    way: see docs/sharding.md.

    Nothing moves between devices unless `device` or `sharding` asks for it, and the arrays are
    uncommitted unless one of them does, so that they mix with mesh-sharded parameters.

    Args:
        tree: a TensorDict, a tensorclass, or any pytree with tensors, TensorDicts or numpy arrays
            in it. jax arrays, ArrayDicts and everything else in it stay as they are.
        copy: None shares where possible; False raises where a leaf would be copied; True copies
            every leaf (JAX's own `copy=True` does not).
        device: a `jax.Device`, or a platform name such as `"gpu"`, to put all leaves on.
        sharding: a `jax.sharding.Sharding` to put all leaves on. Exclusive with `device`.
        narrow: what to do with 64-bit leaves while x64 is off. `"exact"` narrows integers whose
            values all fit in 32 bits and raises for others and for float64 and complex128;
            `"allow"` rounds float64 and complex128 too; `"never"` raises for each.

    Returns:
        The same tree with jax arrays, and ArrayDicts in the place of TensorDicts. Keys, batch
        sizes, names, non-tensor entries and the torch-side class are kept.

    Raises:
        LeafTypeError: leaves that cannot be carried (sparse, nested, quantized, a Partial DTensor,
            ...).
        NarrowingError: 64-bit leaves that would lose values.
        CopyError: `copy=False` and leaves that cannot be shared. Each of these errors lists every
            such leaf, before anything is converted.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> td = TensorDict(x=torch.ones(4, 3), label=torch.arange(4), batch_size=[4])
        >>> ad = to_jax(td)
        >>> ad["x"].unsafe_buffer_pointer() == td["x"].data_ptr(), ad["label"].dtype
        (True, dtype('int32'))
    """
    _check_arguments(copy, device, sharding, narrow)
    parts = take_apart(tree)

    def convert(leaves: list[Any], paths: Paths) -> Sequence[jax.Array]:
        return _convert(leaves, paths, copy, narrow)

    new = _placed(replace_some(parts, crosses_to_jax, convert), device or sharding)
    return parts.put_together(new, arraydict_of)


def crosses_to_jax(kind: type, _loose: bool) -> bool:
    """Whether a leaf of this type crosses; everything else stays as it is."""
    return issubclass(kind, (torch.Tensor, np.ndarray))


def _check_arguments(copy: Any, device: Any, sharding: Any, narrow: str) -> None:
    if copy is not None and not isinstance(copy, bool):
        raise ValueError(f"copy is None, True or False, got {copy!r}.")
    if device is not None and sharding is not None:
        raise ValueError("pass `device` or `sharding`, not both.")
    if narrow not in ("exact", "allow", "never"):
        raise ValueError(f'narrow is "exact", "allow" or "never", got {narrow!r}.')
    if copy is False and (device is not None or sharding is not None):
        raise ValueError(
            "copy=False shares memory where it is: it goes with no device or sharding."
        )


def _convert(
    leaves: Sequence[Any], paths: Paths, copy: bool | None, narrow: Narrow
) -> Sequence[jax.Array]:
    if all_carried(leaves):
        tensors = list(map(torch.Tensor.detach, leaves))
        ready = not copy and all_shared(tensors)
    else:
        refuse(paths, [*map(why_refused_to_jax, leaves)], "to_jax")
        tensors, ready = list(map(_detached, leaves)), False
    if not ready:
        if copy is False:
            _refuse_copies(paths, [*map(why_copied_to_jax, leaves)])
        wide, tensors = tensors, narrowed(paths, tensors, narrow)
        tensors = [
            _ready(new, new is not old, copy) for old, new in zip(wide, tensors, strict=True)
        ]
    arrays = tensors_to_arrays(tensors)
    if copy is False:
        _refuse_copies(paths, _not_shared(tensors, arrays))
    return [*map(_global, leaves, arrays)] if DTensor in {*map(type, leaves)} else arrays


def _global(leaf: Any, array: jax.Array) -> jax.Array:
    return global_array(leaf, array) if isinstance(leaf, DTensor) else array


def _detached(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, DTensor):
        return local_shard(leaf)
    return leaf.detach() if isinstance(leaf, torch.Tensor) else numpy_to_tensor(leaf)


def why_refused_to_jax(leaf: torch.Tensor | np.ndarray) -> str | None:
    """Why `to_jax` cannot carry a leaf, or None when it can."""
    return why_not_global(leaf) if isinstance(leaf, DTensor) else why_not_to_jax(leaf)


def why_copied_to_jax(leaf: torch.Tensor | np.ndarray) -> str | None:
    """Why `to_jax` copies a leaf that it carries, or None when the array shares its memory."""
    if isinstance(leaf, torch.Tensor):
        return why_copied(local_shard(leaf) if isinstance(leaf, DTensor) else leaf)
    return why_numpy_copied(leaf) or why_copied(numpy_to_tensor(leaf))


def _refuse_copies(paths: Paths, reasons: Sequence[str | None]) -> None:
    wide = any("x64" in reason for reason in reasons if reason)
    x64 = "; with x64 on, 64-bit leaves are shared" if wide else ""
    refuse_copies(
        paths, reasons, f"Use copy=None, or tdbridge.consolidate(td), which aligns every leaf{x64}."
    )


def _ready(tensor: torch.Tensor, copied: bool, copy: bool | None) -> torch.Tensor:
    """`tensor` itself where its memory can be shared, else a fresh, aligned copy."""
    if (copy and not copied) or why_copied(tensor) is not None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor


def _not_shared(tensors: Sequence[torch.Tensor], arrays: Sequence[jax.Array]) -> list[str | None]:
    """That JAX shares memory is seen, not promised: compare the pointers."""
    return [
        None if shares_memory(tensor, array) else "this version of JAX copied it all the same"
        for tensor, array in zip(tensors, arrays, strict=True)
    ]


def _placed(leaves: Sequence[Any], target: Any) -> Sequence[Any]:
    """All jax arrays of the tree on the device or sharding that was asked for."""
    if target is None:
        return leaves
    if isinstance(target, str):
        target = jax.local_devices(backend=target)[0]
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    placed = list(leaves)
    for i, array in zip(at, jax.device_put([leaves[i] for i in at], target), strict=True):
        placed[i] = array
    return placed
