"""torch -> JAX."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer
from torch.distributed.tensor import DTensor

from tdbridge.convert.aliasing import Switch, follow
from tdbridge.convert.copies import shareable
from tdbridge.convert.dlpack import (
    arrays_at_once,
    numpy_to_tensor,
    shares_memory,
    tensors_to_arrays,
)
from tdbridge.convert.dtensor import global_array, why_not_global
from tdbridge.convert.leaves import Parts, is_unpacked, replace_some, spread, take_apart, tied
from tdbridge.convert.narrowing import Narrow, check_narrow, check_narrow_argument
from tdbridge.convert.packing import pack_tree
from tdbridge.convert.placement import Places, placed, places_of, refuse_uneven
from tdbridge.convert.sharing import (
    DELETED,
    Paths,
    all_carried,
    refuse,
    refuse_copies,
    why_copied,
    why_not_to_jax,
    why_numpy_copied,
)
from tdbridge.layout.dtensors import local_leaf, local_shard
from tdbridge.pytrees.nodes import arraydict_of


def to_jax(
    tree: Any,
    *,
    copy: bool | None = None,
    device: Any = None,
    sharding: Any = None,
    narrow: Narrow = "exact",
    packed: bool = False,
) -> Any:
    """Converts every tensor of `tree` to a jax array; TensorDicts become ArrayDicts.

    On the CPU a leaf shares memory with its tensor when the tensor starts on a multiple of 64
    bytes and is C-contiguous. Then a later in-place write in torch changes the array, and JAX,
    which takes arrays for constant, may or may not see it: do not write to a tensor that JAX still
    reads. Call `share_memory_()` before the conversion: after it, torch moves the tensor and
    frees the memory under the array. Everything else is copied once. Leaves are detached from
    autograd.

    A DTensor becomes an array over the processes of the job, its local shard shared in the same
    way: see docs/sharding.md.

    Nothing moves between devices unless `device` or `sharding` asks for it, and the arrays are
    uncommitted unless one of them does, so that they mix with mesh-sharded parameters. What moves
    has arrived when the call returns, so that its tensor may be written.

    Args:
        tree: a TensorDict or its kin (docs/conversion.md lists the kinds), or any pytree with
            tensors, TensorDicts or numpy arrays in it, dataclasses included. jax arrays,
            ArrayDicts and everything else in it stay as they are. A tensor that stands in several
            places becomes one array.
        copy: None shares where possible; False raises where a leaf would be copied; True copies
            every leaf (JAX's own `copy=True` does not).
        device: a `jax.Device`, or a platform name such as `"gpu"`, to put all leaves on.
        sharding: a `jax.sharding.Sharding` to put all leaves on, or a tree of them with the paths
            of `tree`: dicts, lists, namedtuples, ArrayDicts. One that stands above several leaves
            is for all of them; None leaves them where they are, uncommitted. Exclusive with
            `device`.
        narrow: what to do with 64-bit leaves while x64 is off. `"exact"` narrows integers whose
            values all fit in 32 bits and raises for others and for float64 and complex128;
            `"allow"` rounds float64 and complex128 too; `"never"` raises for each.
        packed: give a `PackedArrayDict`, one flat array per dtype, for each TensorDict. A
            consolidated one (`tdbridge.consolidate`) is shared, at a cost that does not grow with
            its leaves: they are not looked at, so that one that was given other memory under the
            lock (`tensor.data = ...`) goes unseen, as when stock tensordict pickles the tree. Any
            other is consolidated first, which copies it. ArrayDicts are packed too, by
            `ArrayDict.pack`.

    Returns:
        The same tree with jax arrays, and ArrayDicts in the place of TensorDicts. Keys, batch
        sizes, names, non-tensor entries and the torch-side class are kept.

    Raises:
        LeafTypeError: leaves that cannot be carried (sparse, nested, quantized, a Partial DTensor,
            a deleted jax array that would be moved, ...).
        NarrowingError: 64-bit leaves that would lose values.
        LayoutError: a tree of shardings that has other paths, or one that cuts a leaf unevenly.
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
    _check_arguments(copy, device, sharding, narrow, packed)

    def convert(leaves: Sequence[Any], paths: Paths) -> Sequence[jax.Array]:
        return _convert(leaves, paths, copy, narrow)

    def convert_segments(segments: Sequence[Any], paths: Paths) -> Sequence[jax.Array]:
        arrays = convert(segments, paths)
        if Switch.on:
            follow(paths, segments, arrays)
        return arrays

    if packed:
        rest = partial(to_jax, copy=copy, narrow=narrow)
        tree = pack_tree(tree, copy, convert_segments, rest)
        if device is None and sharding is None:
            return tree
    parts = take_apart(tree, is_unpacked)
    places = places_of(parts, device, sharding)
    _refuse_deleted(parts, places)
    refuse_uneven(parts, places)
    new = placed(replace_some(parts, crosses_to_jax, convert), places)
    if Switch.on:
        follow(parts.paths, parts.leaves, new)
    return parts.put_together(new, arraydict_of)


def _refuse_deleted(parts: Parts, places: Places) -> None:
    """A deleted jax array stays as it is, but cannot be moved."""
    pairs = list(zip(parts.leaves, places, strict=False))  # no places when nothing moves
    if any(_is_lost(leaf, place) for leaf, place in pairs):
        reasons = [DELETED if _is_lost(*pair) else _why_not_crossing(pair[0]) for pair in pairs]
        refuse(parts.paths, reasons, "to_jax")


def _is_lost(leaf: Any, place: Any) -> bool:
    moves = place is not None and isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    return moves and leaf.is_deleted()


def _why_not_crossing(leaf: Any) -> str | None:
    return why_refused_to_jax(leaf) if crosses_to_jax(type(leaf), False) else None


def crosses_to_jax(kind: type, _loose: bool) -> bool:
    """Whether a leaf of this type crosses; everything else stays as it is."""
    return issubclass(kind, (torch.Tensor, np.ndarray))


def _check_arguments(copy: Any, device: Any, sharding: Any, narrow: str, packed: Any) -> None:
    if copy is not None and not isinstance(copy, bool):
        raise ValueError(f"copy is None, True or False, got {copy!r}.")
    if device is not None and sharding is not None:
        raise ValueError("pass `device` or `sharding`, not both.")
    check_narrow_argument(narrow)
    if not isinstance(packed, bool):
        raise ValueError(f"packed is True or False, got {packed!r}.")
    if copy is False and (device is not None or sharding is not None):
        raise ValueError(
            "copy=False shares memory where it is: it goes with no device or sharding."
        )


def _convert(
    leaves: Sequence[Any], paths: Paths, copy: bool | None, narrow: Narrow
) -> Sequence[jax.Array]:
    if not copy and (arrays := arrays_at_once(leaves)) is not None:
        if copy is False:
            _refuse_copies(paths, _not_shared(leaves, arrays))
        return arrays
    if not all_carried(leaves):
        refuse(paths, [*map(why_refused_to_jax, leaves)], "to_jax")
    if copy is False:
        _refuse_copies(paths, [*map(why_copied_to_jax, leaves)])
    tensors = list(map(_detached, leaves))
    check_narrow(paths, tensors, narrow)
    # A state dict has another tensor for each name of a tied weight.
    groups = tied(list(map(_view_of, tensors)))
    if groups is None:
        arrays = _to_arrays(tensors, copy)
    else:
        arrays = spread(groups, _to_arrays([tensors[i] for i, *_ in groups], copy))
    if copy is False:
        _refuse_copies(paths, _not_shared(tensors, arrays))
    return [*map(_global, leaves, arrays)] if DTensor in {*map(type, leaves)} else arrays


def _to_arrays(tensors: Sequence[torch.Tensor], copy: bool | None) -> Sequence[jax.Array]:
    return tensors_to_arrays(shareable(tensors, copy=bool(copy)))


def _view_of(tensor: torch.Tensor) -> Any:
    """What two tensors have in common that are one view of one memory."""
    if tensor.numel() == 0:
        return id(tensor)
    view = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    return *view, tensor.is_conj(), tensor.is_neg()


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
        return why_copied(local_leaf(leaf))
    return why_numpy_copied(leaf) or why_copied(numpy_to_tensor(leaf))


def _refuse_copies(paths: Paths, reasons: Sequence[str | None]) -> None:
    wide = any("x64" in reason for reason in reasons if reason)
    x64 = "; with x64 on, 64-bit leaves are shared" if wide else ""
    refuse_copies(
        paths, reasons, f"Use copy=None, or tdbridge.consolidate(td), which aligns every leaf{x64}."
    )


def _not_shared(tensors: Sequence[torch.Tensor], arrays: Sequence[jax.Array]) -> list[str | None]:
    """That JAX shares memory is seen, not promised: compare the pointers."""
    return [
        None if shares_memory(tensor, array) else "this version of JAX copied it all the same"
        for tensor, array in zip(tensors, arrays, strict=True)
    ]
