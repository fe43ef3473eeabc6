"""jax: arrays over numpy memory, uncommitted; and DLPack capsules without the wrapper around them.

`jax.dlpack.from_dlpack` gives COMMITTED arrays: mixed with mesh-sharded ones they raise, and on a
machine with an accelerator jit then silently runs on the CPU. `jax.device_put(view)` gives
uncommitted ones, at 15-23 us each; the binding beneath it takes 2.7 us (1,000 leaves, measured).
Of the 5 us that `torch.from_dlpack(array)` takes, 4 are spent in Python around the two bindings.
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from operator import attrgetter, methodcaller
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import SingleDeviceSharding


def _find_array_impl() -> Any:
    try:
        from jax._src.array import ArrayImpl
    except ImportError:
        return None
    return ArrayImpl


def _find(name: str) -> Any:
    try:
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        return None
    return getattr(_jax, name, None)


_batched_device_put = _find("batched_device_put")
_to_capsule = _find("buffer_to_dlpack_managed_tensor")
_await_all = _find("batched_block_until_ready")
_ArrayImpl = _find_array_impl()
_first_shard = getattr(_ArrayImpl, "_fully_replicated_shard", None)


def put(views: Sequence[np.ndarray], device: Any, weak: Collection[int] = ()) -> list[jax.Array]:
    """One uncommitted array on the CPU `device` per view, sharing its memory where it can.

    Args:
        views: C-contiguous arrays of dtypes that JAX keeps (no 64-bit one while x64 is off). A
            view that starts on a multiple of 64 bytes is shared, any other one copied.
        device: the CPU device.
        weak: which of them are arrays of a weak type; ignored where only the public function is.
    """
    with _no_guard():
        if _batched_device_put is None:
            return _put_public(views, device)
        to, devices = SingleDeviceSharding(device), [device]
        avals = list(map(_aval, map(_shape, views), map(_dtype, views)))
        for i in weak:
            avals[i] = avals[i].update(weak_type=True)
        return [
            _batched_device_put(aval, to, [view], devices, False)
            for aval, view in zip(avals, views, strict=True)
        ]


def _no_guard() -> AbstractContextManager[Any]:
    """Lets transfers pass, since a conversion is no implicit one; 30 us where there is a guard."""
    guard = jax.config.jax_transfer_guard_host_to_device  # pyright: ignore[reportAttributeAccessIssue]
    return nullcontext() if guard in (None, "allow") else jax.transfer_guard("allow")


_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


def _put_public(views: Sequence[np.ndarray], device: Any) -> list[jax.Array]:
    # Without a device the result is uncommitted, but lands on the default device.
    default = getattr(jax.config, "jax_default_device", None) or jax.local_devices()[0]
    with jax.ensure_compile_time_eval():  # arrays, not tracers, also while JAX traces
        return jax.device_put(list(views), None if default == device else device)


@lru_cache(maxsize=4096)
def _aval(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return ShapedArray(shape, dtype)


def uncommitted(array: jax.Array) -> jax.Array:
    """The same array, memory shared, free to follow other arguments to their device.

    Returned as it is, committed, when this version of JAX has no way to say so.
    """
    if _ArrayImpl is None:
        return array
    try:
        return _ArrayImpl(array.aval, array.sharding, [array], committed=False)
    except TypeError:
        return array


def wait(arrays: Sequence[jax.Array]) -> None:
    """Waits until all are computed: 0.09 us for an array, where `jax.block_until_ready` takes 0.18.

    Raises whatever went wrong when one was computed.
    """
    (jax.block_until_ready if _await_all is None else _await_all)(list(arrays))


def dtypes_of(arrays: Sequence[jax.Array]) -> set[Any]:
    """The different dtypes of arrays; thousands of them have a few abstract values."""
    try:
        return {aval.dtype for aval in {*map(_aval_of, arrays)}}
    except (AttributeError, TypeError):
        return {array.dtype for array in arrays}


def are_on_one_cpu(arrays: Sequence[jax.Array]) -> bool:
    """Whether each array lies on one device, and that is a CPU."""
    try:
        shardings = {id(s): s for s in map(_sharding_of, arrays)}  # their hashes take longer
    except AttributeError:
        shardings = {id(s): s for s in [array.sharding for array in arrays]}
    return all(
        isinstance(s, SingleDeviceSharding) and {d.platform for d in s.device_set} == {"cpu"}
        for s in shardings.values()
    )


def shardings_of(arrays: Sequence[jax.Array]) -> set[type]:
    """The different kinds of sharding of arrays, not through a property of each."""
    try:
        return {*map(type, map(_sharding_of, arrays))}
    except AttributeError:
        return {type(array.sharding) for array in arrays}


_aval_of, _sharding_of = attrgetter("aval"), attrgetter("_sharding")


def dlpack_sources(arrays: Sequence[jax.Array], *, by_view: bool = True) -> list[Any]:
    """What torch takes for each array, each on one device; waits until all are computed.

    Capsules on the CPU; elsewhere, where streams have to be ordered, the arrays themselves.

    Args:
        arrays: what to export.
        by_view: on the CPU, by a numpy view where that is possible. It keeps the array itself
            alive, and not only its memory.
    """
    if jax.default_backend() == "cpu":
        return _capsules(arrays, by_view)
    wait(arrays)
    return [_capsules([a], by_view)[0] if a.platform() == "cpu" else a for a in arrays]


def _capsules(arrays: Sequence[jax.Array], by_view: bool) -> list[Any]:
    """Of numpy views where numpy has the dtype: 2 us for an array that was just made, not 4.

    Of arrays that were exported before, it is 1.3 us instead of 0.6 (measured). Either way a
    donated array is copied, and a deleted one lives on, as long as the capsule does.
    """
    if by_view and all(dtype.isbuiltin == 1 for dtype in dtypes_of(arrays)):
        views = list(map(np.asarray, arrays))  # which waits, too
        # Of an array with a layout of its own it is a copy, and has another base.
        if {*map(type, map(_base, views))} <= {memoryview}:
            return list(map(_numpy_capsule, views))
    wait(arrays)
    if _to_capsule is None:
        return list(arrays)
    return list(map(_to_capsule, _shards(arrays)))


_base = attrgetter("base")
# Version 1.0 carries the read-only flag, without which numpy refuses; torch does not mind it.
_numpy_capsule = methodcaller("__dlpack__", max_version=(1, 0))


def _shards(arrays: Sequence[jax.Array]) -> Iterable[jax.Array]:
    """Each array's one shard, which is what `__dlpack__` exports.

    Deleting an array whose own buffer is exported ends the process.
    """
    if _first_shard is None:
        return [array.addressable_data(0) for array in arrays]
    return map(_first_shard, arrays)  # what `addressable_data` calls
