"""What becomes of a batch between its source and the training step."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import torch
from tensordict import is_tensor_collection

from tdbridge.cast import Precision
from tdbridge.convert import to_jax, to_torch
from tdbridge.convert.dlpack import shares_memory
from tdbridge.convert.leaves import is_unpacked, take_apart
from tdbridge.convert.narrowing import Narrow, check_narrow_argument
from tdbridge.convert.records import opened
from tdbridge.layout.buffer import consolidate
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.tree import leaves_of, rebuild, tree_of
from tdbridge.loaders.pinned import Uploads
from tdbridge.loaders.sharded import put_on, spans_processes

To = Literal["torch", "jax", "both"]
Receive = Callable[[], Any]
"""Gives a batch to the thread that calls it, which is the one that works with it."""
Prepare = Callable[[Any], Receive]
Change = Callable[[Any], Any]


def change_of(transform: Change | None, dtype: Any) -> Change:
    """What is done to a batch on the host, before it goes anywhere.

    Raises:
        LeafTypeError: `dtype` is none to cast to.
    """
    if dtype is None:
        return transform or (lambda batch: batch)
    precision = dtype if isinstance(dtype, Precision) else Precision(compute=dtype)
    if transform is None:
        return precision.to_compute
    return lambda batch: precision.to_compute(transform(batch))


def preparation(
    to: To,
    change: Change,
    *,
    device: Any,
    sharding: Any,
    packed: bool,
    narrow: Narrow,
    prefetch: int,
) -> Prepare:
    """How a batch is prepared in the fetching thread, and what is left to the one that works.

    Args:
        to: `"torch"`, `"jax"` or `"both"`.
        change: what is done to a batch on the host first.
        device: as of `Loader`.
        sharding: as of `Loader`.
        packed: as of `Loader`.
        narrow: as of `Loader`.
        prefetch: how many batches are on their way at once.

    Raises:
        ValueError: arguments that do not go together.
    """
    _check(to, device, sharding, packed, narrow)
    in_jax = partial(to_jax, narrow=narrow, packed=packed)
    if to == "jax":
        if spans_processes(sharding):
            return _at_once(change, partial(put_on, sharding, in_jax))
        return _at_once(change, partial(in_jax, device=device, sharding=sharding))
    pair = partial(both_packed if packed else both, in_jax)
    if device is None or torch.device(device).type == "cpu":
        return _at_once(change, in_torch if to == "torch" else pair)
    upload = Uploads(torch.device(device), prefetch + 1)

    def prepare(batch: Any) -> Receive:
        receive = upload(change(batch))
        return receive if to == "torch" else lambda: pair(receive())

    return prepare


def _at_once(change: Change, convert: Change) -> Prepare:
    """All of it in the fetching thread."""

    def prepare(batch: Any) -> Receive:
        ready = convert(change(batch))
        return lambda: ready

    return prepare


def _check(to: str, device: Any, sharding: Any, packed: bool, narrow: str) -> None:
    if to not in ("torch", "jax", "both"):
        raise ValueError(f'to is "torch", "jax" or "both", got {to!r}.')
    if to != "jax" and sharding is not None:
        raise ValueError(f'sharding is for to="jax", got it with to={to!r}.')
    if to == "torch" and packed:
        raise ValueError('packed is for to="jax" and to="both".')
    if packed and spans_processes(sharding):
        raise ValueError("packed is for one process: a flat array has no batch to cut.")
    if device is not None and sharding is not None:
        raise ValueError("pass `device` or `sharding`, not both.")
    if to == "jax" and isinstance(device, torch.device):
        raise ValueError(
            f"for JAX, device is a jax.Device or the name of a platform, got {device}."
        )
    check_narrow_argument(narrow)


def in_torch(batch: Any) -> Any:
    """`to_torch`, and a TensorDict that needs none as it is: consolidated, if it was."""
    if is_tensor_collection(batch):
        kinds = {*map(type, leaves_of(tree_of(batch)))}
        if all(issubclass(kind, torch.Tensor) for kind in kinds):
            return batch
    return to_torch(batch)


def both(in_jax: Change, batch: Any) -> tuple[Any, Any]:
    """The batch for torch and for JAX, over the same memory.

    A leaf that JAX narrows (int64 while x64 is off) keeps its dtype, and with it memory of its
    own, in torch. Nothing is copied twice: what JAX cannot share is copied for both.
    """
    tensors = in_torch(batch)
    arrays = in_jax(tensors)
    parts, others = take_apart(tensors), take_apart(arrays)
    found = dict(zip(others.paths(), others.leaves, strict=True))
    shared = [
        _over(found.get(path), leaf) for path, leaf in zip(parts.paths(), parts.leaves, strict=True)
    ]
    if any(new is not old for new, old in zip(shared, parts.leaves, strict=True)):
        tensors = parts.put_together(shared, rebuild)
    return tensors, arrays


def _over(array: Any, leaf: Any) -> Any:
    """The leaf, or one over the memory of `array` if that is a copy of it."""
    if not (isinstance(leaf, torch.Tensor) and isinstance(array, jax.Array)):
        return leaf
    if array.dtype != dtype_of(leaf.dtype).in_numpy or shares_memory(leaf, array):
        return leaf
    return to_torch(array)


def both_packed(in_jax: Change, batch: Any) -> tuple[Any, Any]:
    """As `both`, packed in JAX: a TensorDict lies in the buffer whose segments the arrays are."""
    leaves, treedef = jax.tree.flatten(opened(in_torch(batch)), is_leaf=is_unpacked)
    whole = [consolidate(leaf) if is_unpacked(leaf) else leaf for leaf in leaves]
    pairs = [(v, in_jax(v)) if is_unpacked(v) else both(in_jax, v) for v in whole]
    tensors, arrays = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return treedef.unflatten(tensors), treedef.unflatten(arrays)
