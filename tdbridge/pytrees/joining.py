"""The leaves of a tree, copied together into the segments of its layout."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from tdbridge.errors import LeafTypeError, NarrowingError
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.spec import ALIGNMENT, Layout, Path, path_str
from tdbridge.pytrees.prng import is_key
from tdbridge.pytrees.segments import put_as_they_are


def joined(layout: Layout, leaves: Sequence[Any]) -> list[Any]:
    """The segments of a layout over copies of its leaves, in the order of the layout.

    `check_joined` has seen that they can be joined.
    """
    devices = {leaf.device for leaf in leaves if _has_device(leaf)}
    placed = list(zip(layout.leaves, leaves, strict=True))
    groups = [
        (segment, [(spec, leaf) for spec, leaf in placed if spec.dtype == segment.dtype])
        for segment in layout.segments
    ]
    device = next(iter(devices), jax.local_devices(backend="cpu")[0])
    if any(isinstance(leaf, Tracer) for leaf in leaves) or device.platform != "cpu":
        with jax.enable_x64(True):
            return [_concatenated(segment, own) for segment, own in groups]
    committed = any(_has_device(leaf) and leaf.committed for leaf in leaves)
    return put_as_they_are([_copied(segment, own) for segment, own in groups], device, committed)


def check_joined(leaves: Sequence[Any], paths: Sequence[Path]) -> None:
    """Checks that leaves can be joined.

    Raises:
        LeafTypeError: leaves are no arrays, PRNG keys, deleted, or not on one device.
        NarrowingError: numpy leaves of 64 bits would be narrowed by JAX.
    """
    reasons = list(map(_why_not_joined, leaves))
    if not any(reasons):
        devices = [leaf.device if _has_device(leaf) else None for leaf in leaves]
        if len({*devices} - {None}) > 1:
            reasons = [
                d and f"an array on {d}: put all leaves on one device first" for d in devices
            ]
    _refuse(LeafTypeError, "these leaves cannot be packed", reasons, paths)
    _refuse(NarrowingError, _NARROWED, list(map(_why_narrowed, leaves)), paths)


_NARROWED = (
    "JAX would narrow these leaves while x64 is off. Convert the tree with tdbridge.to_jax first, "
    "or turn x64 on"
)


def _refuse(
    error: type[Exception], message: str, reasons: Sequence[str | None], paths: Sequence[Path]
) -> None:
    found = [f"  {path_str(p)}: got {why}." for p, why in zip(paths, reasons, strict=True) if why]
    if found:
        raise error("\n".join([f"{message}:", *found]))


def _why_narrowed(leaf: Any) -> str | None:
    if isinstance(leaf, jax.Array) or jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype:
        return None
    return f"a numpy array of {leaf.dtype}"


def is_deleted(leaf: Any) -> bool:
    """Whether a leaf is a jax array whose memory is gone."""
    return _has_device(leaf) and leaf.is_deleted()


def _has_device(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def _why_not_joined(leaf: Any) -> str | None:
    if isinstance(leaf, np.ma.MaskedArray):
        return "a MaskedArray, whose mask would be lost: call `filled(...)`"
    if is_deleted(leaf):
        return "an array that was deleted or donated"
    if _has_device(leaf) and not isinstance(leaf.sharding, SingleDeviceSharding):
        return (
            "an array over a mesh, which a packed tree cannot keep: put it on one device, or keep "
            "it out"
        )
    if is_key(leaf):
        return "PRNG keys, which cannot be packed: keep them beside the packed tree"
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return None
    return f"a {type(leaf).__name__}, which holds no values"


def _copied(segment: Any, placed: Sequence[tuple[Any, Any]]) -> np.ndarray:
    room = np.zeros(segment.nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    flat = room[start : start + segment.nbytes].view(dtype_of(segment.dtype).in_numpy)
    for spec, leaf in placed:
        at = (spec.offset - segment.offset) // flat.itemsize
        flat[at : at + spec.numel].reshape(spec.shape)[...] = np.asarray(leaf)
    return flat


def _concatenated(segment: Any, placed: Sequence[tuple[Any, Any]]) -> jax.Array:
    size, at, parts = dtype_of(segment.dtype).itemsize, 0, []
    for spec, leaf in placed:
        gap = (spec.offset - segment.offset) // size - at
        parts += [jnp.zeros(gap, segment.dtype), jnp.ravel(leaf)]
        at += gap + spec.numel
    return jnp.concatenate([*parts, jnp.zeros(segment.nbytes // size - at, segment.dtype)])
