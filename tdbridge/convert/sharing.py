"""Will this leaf share memory? If not, why; and what cannot cross at all."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer

from tdbridge._compat.torch import all_plain, why_not_dense
from tdbridge.errors import CopyError, LeafTypeError
from tdbridge.layout.dtypes import NARROWED, TABLE, DType, dtype_of
from tdbridge.layout.spec import ALIGNMENT, Path, path_str
from tdbridge.pytrees.prng import is_key


def why_not_to_jax(leaf: torch.Tensor | np.ndarray) -> str | None:
    """Why a tensor or a numpy array cannot become a jax array at all, or None when it can."""
    if isinstance(leaf, torch.Tensor) and (reason := why_not_dense(leaf)) is not None:
        return reason
    if isinstance(leaf, np.ma.MaskedArray):
        return _MASKED
    return _why_not_dtype(leaf.dtype, "JAX and torch do not share")


_MASKED = "a MaskedArray, whose mask would be lost: call `filled(...)`, or pass data and mask"


def _why_not_dtype(dtype: Any, fault: str) -> str | None:
    row = _known(dtype)
    if row is not None and row.crosses:
        return None
    if row is None and isinstance(dtype, np.dtype):
        return f"dtype {dtype}, which is no number: keep it outside of the tree"
    return f"dtype {dtype}, which {fault}: cast it, or view it as an integer dtype"


def why_not_to_torch(array: Any) -> str | None:
    """Why a jax or numpy array cannot become a tensor at all, or None when it can."""
    if isinstance(array, Tracer):
        return "a tracer: convert outside of jit, vmap and grad"
    if isinstance(array, jax.Array):
        if (reason := _why_not_readable(array)) is not None or is_key(array):
            return reason
    elif isinstance(array, np.ma.MaskedArray):
        return _MASKED
    elif not isinstance(array, (np.ndarray, np.generic)):
        return f"a {type(array).__name__}, which holds no values"
    return _why_not_dtype(array.dtype, "torch does not have")


def why_numpy_copied(array: np.ndarray) -> str | None:
    """Why a tensor cannot share the memory of a numpy array, or None when it can.

    torch knows no negative strides (`torch.from_dlpack` ends the process), no foreign byte order
    and no read-only memory. JAX could share the last: but the tensor that `to_torch` makes of such
    an array is writable, and a write to a file that is mapped for reading ends the process.
    """
    if not array.dtype.isnative:
        return f"its byte order is {array.dtype.byteorder!r}"
    if not array.flags.writeable:
        return "it is read-only"
    if any(stride < 0 for stride in array.strides):
        return f"it has negative strides {array.strides}"
    if any(stride % array.itemsize for stride in array.strides):
        return f"its strides {array.strides} are no multiples of its {array.itemsize} bytes"
    return None


DELETED = "an array that was deleted or donated"


def _why_not_readable(array: jax.Array) -> str | None:
    if array.is_deleted():
        return DELETED
    if not (array.is_fully_addressable or array.is_fully_replicated):
        return "an array with shards in other processes: pass its addressable shards"
    return None


def _known(dtype: Any) -> DType | None:
    try:
        return dtype_of(dtype)
    except LeafTypeError:
        return None


def narrowed_dtype(dtype: torch.dtype) -> str | None:
    """What JAX would make of `dtype` now: the 32-bit dtype while x64 is off, else None."""
    name = dtype_of(dtype).name
    if name not in NARROWED or jax.dtypes.canonicalize_dtype(name) == np.dtype(name):
        return None
    return NARROWED[name]


def why_copied(tensor: torch.Tensor) -> str | None:
    """Why the jax array cannot share the memory of `tensor`, or None when it can."""
    if (narrow := narrowed_dtype(tensor.dtype)) is not None:
        return f"{dtype_of(tensor.dtype).name} becomes {narrow} while x64 is off"
    if tensor.is_neg():
        return "its negative bit has to be resolved"
    if tensor.is_conj():
        return "its conjugate bit has to be resolved"
    if tensor.numel() == 0:
        return None
    if not tensor.is_contiguous():
        # JAX could take a transposed tensor with its layout, but programs compiled for the default
        # layout then read its elements in the wrong order.
        return f"its strides {tuple(tensor.stride())} are not row-major"
    if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
        return f"it starts {tensor.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT}"
    return None


def all_carried(leaves: Sequence[Any]) -> bool:
    """Whether all leaves are plain tensors of dtypes that cross, judged at once.

    False says nothing of the single leaf: ask `why_not_to_jax` of each.
    """
    return all_plain(leaves) and {leaf.dtype for leaf in leaves} <= CARRIED


CARRIED = {row.torch for row in TABLE if row.crosses}
CARRIED_NUMPY = {row.numpy for row in TABLE if row.crosses}


Paths = Callable[[], Sequence[Path]]
"""Gives the path of each leaf, for an error."""


def refuse(paths: Paths, reasons: Sequence[str | None], verb: str) -> None:
    """Raises one error that lists every leaf that cannot be converted.

    Args:
        paths: gives each leaf's path.
        reasons: why each leaf cannot be converted, or None.
        verb: what was tried.

    Raises:
        LeafTypeError: there is at least one reason.
    """
    if any(reasons):
        raise LeafTypeError(f"{verb} cannot carry:\n{lines(paths(), reasons, 'got ')}")


def refuse_copies(paths: Paths, reasons: Sequence[str | None], advice: str) -> None:
    """Raises one error that lists every leaf that `copy=False` forbids.

    Args:
        paths: gives each leaf's path.
        reasons: why each leaf would be copied, or None.
        advice: what to do.

    Raises:
        CopyError: there is at least one reason.
    """
    if any(reasons):
        raise CopyError(
            "copy=False, but these leaves cannot share memory:\n"
            f"{lines(paths(), reasons)}\n{advice}"
        )


def lines(paths: Sequence[Path], reasons: Sequence[str | None], prefix: str = "") -> str:
    """One line per leaf that has a reason."""
    pairs = zip(paths, reasons, strict=True)
    return "\n".join(f"  {path_str(p)}: {prefix}{why}." for p, why in pairs if why is not None)
