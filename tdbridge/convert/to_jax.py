"""torch -> JAX."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from tdbridge.convert.dlpack import numpy_to_tensor, shares_memory, tensors_to_arrays
from tdbridge.convert.leaves import take_apart
from tdbridge.convert.narrowing import Narrow, narrowed
from tdbridge.convert.sharing import refuse, refuse_copies, why_copied, why_not_to_jax
from tdbridge.layout.spec import Path
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
    bytes and is dense (transposed is fine). Then a later in-place write in torch changes the
    array, and JAX, which takes arrays for constant, may or may not see it: do not write to a tensor
    that JAX still reads. Everything else is copied once. Leaves are detached from autograd.

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
        LeafTypeError: leaves that cannot be carried (sparse, nested, quantized, DTensor, ...).
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
    leaves, put_together = take_apart(tree)
    new = [leaf.value for leaf in leaves]
    at = [i for i, leaf in enumerate(new) if isinstance(leaf, (torch.Tensor, np.ndarray))]
    paths = [leaves[i].path for i in at]
    tensors = _as_tensors(paths, [new[i] for i in at])
    arrays = _convert(paths, tensors, copy, narrow)
    for i, array in zip(at, _placed(arrays, device or sharding), strict=True):
        new[i] = array
    return put_together(new, arraydict_of)


def _check_arguments(copy: Any, device: Any, sharding: Any, narrow: str) -> None:
    if copy not in (None, True, False):
        raise ValueError(f"copy is None, True or False, got {copy!r}.")
    if device is not None and sharding is not None:
        raise ValueError("pass `device` or `sharding`, not both.")
    if narrow not in ("exact", "allow", "never"):
        raise ValueError(f'narrow is "exact", "allow" or "never", got {narrow!r}.')
    if copy is False and (device is not None or sharding is not None):
        raise ValueError(
            "copy=False shares memory where it is: it goes with no device or sharding."
        )


def _as_tensors(paths: Sequence[Path], leaves: Sequence[Any]) -> list[torch.Tensor]:
    reasons = [why_not_to_jax(leaf) for leaf in leaves]
    refuse(zip(paths, reasons, strict=True), "to_jax")
    return [
        numpy_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf.detach() for leaf in leaves
    ]


def _convert(
    paths: Sequence[Path], tensors: Sequence[torch.Tensor], copy: bool | None, narrow: Narrow
) -> list[jax.Array]:
    reasons = [why_copied(tensor) for tensor in tensors]
    narrow_tensors = narrowed(paths, tensors, narrow)
    if copy is False:
        refuse_copies(zip(paths, reasons, strict=True))
    ready = [
        _ready(new, copied=new is not old, copy=copy)
        for old, new in zip(tensors, narrow_tensors, strict=True)
    ]
    arrays = tensors_to_arrays(ready)
    if copy is False:
        refuse_copies(_not_shared(paths, ready, arrays))
    return arrays


def _ready(tensor: torch.Tensor, *, copied: bool, copy: bool | None) -> torch.Tensor:
    """`tensor` itself where its memory can be shared, else a fresh, aligned copy."""
    if (copy and not copied) or why_copied(tensor) is not None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor


def _not_shared(
    paths: Sequence[Path], tensors: Sequence[torch.Tensor], arrays: Sequence[jax.Array]
) -> Iterable[tuple[Path, str | None]]:
    """That JAX shares memory is seen, not promised: compare the pointers."""
    for path, tensor, array in zip(paths, tensors, arrays, strict=True):
        shared = shares_memory(tensor, array)
        yield path, None if shared else "this version of JAX copied it all the same"


def _placed(arrays: Sequence[jax.Array], target: Any) -> Sequence[jax.Array]:
    if isinstance(target, str):
        target = jax.devices(target)[0]
    return arrays if target is None else jax.device_put(list(arrays), target)
