"""jax: arrays over numpy memory, uncommitted; and DLPack capsules without the wrapper around them.

`jax.dlpack.from_dlpack` gives COMMITTED arrays: mixed with mesh-sharded ones they raise, and on a
machine with an accelerator jit then silently runs on the CPU. `jax.device_put(view)` gives
uncommitted ones, at 15-23 us each; the binding beneath it takes 2.7 us (1,000 leaves, measured).
Of the 5 us that `torch.from_dlpack(array)` takes, 4 are spent in Python around the two bindings.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.sharding import SingleDeviceSharding


def _find_put() -> Any:
    try:
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

        return _jax.batched_device_put
    except (ImportError, AttributeError):
        return None


def _find_array_impl() -> Any:
    try:
        from jax._src.array import ArrayImpl
    except ImportError:
        return None
    return ArrayImpl


def _find_export() -> Any:
    try:
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

        return _jax.buffer_to_dlpack_managed_tensor
    except (ImportError, AttributeError):
        return None


_batched_device_put = _find_put()
_to_capsule = _find_export()
_ArrayImpl = _find_array_impl()


def put(views: Sequence[np.ndarray], device: Any) -> list[jax.Array]:
    """One uncommitted array on the CPU `device` per view, sharing its memory where it can.

    Args:
        views: C-contiguous arrays of dtypes that JAX keeps (no 64-bit one while x64 is off). A
            view that starts on a multiple of 64 bytes is shared, any other one copied.
        device: the CPU device.
    """
    with jax.transfer_guard("allow"):  # a conversion is no implicit transfer
        if _batched_device_put is None:
            return _put_public(views, device)
        to, devices = SingleDeviceSharding(device), [device]
        return [
            _batched_device_put(_aval(v.shape, v.dtype), to, [v], devices, False) for v in views
        ]


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


def dlpack_sources(arrays: Sequence[jax.Array]) -> list[Any]:
    """What torch takes for each array, all of them computed and each on one device.

    Capsules on the CPU; elsewhere, where streams have to be ordered, the arrays themselves.
    """
    if _to_capsule is None:
        return list(arrays)
    # Of the array's one shard, as `__dlpack__` does it: deleting an array whose own buffer is
    # exported ends the process.
    if jax.default_backend() == "cpu":
        return [_to_capsule(array.addressable_data(0)) for array in arrays]
    return [_to_capsule(a.addressable_data(0)) if a.platform() == "cpu" else a for a in arrays]
