"""Will this leaf share memory? If not, why; and what cannot cross at all."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer

from tdbridge._compat.torch import why_not_dense
from tdbridge.errors import CopyError, LeafTypeError
from tdbridge.layout.dtypes import NARROWED, DType, dtype_of
from tdbridge.layout.spec import ALIGNMENT, Path, path_str


def why_not_to_jax(leaf: torch.Tensor | np.ndarray) -> str | None:
    """Why a tensor or a numpy array cannot become a jax array at all, or None when it can."""
    if isinstance(leaf, torch.Tensor) and (reason := why_not_dense(leaf)) is not None:
        return reason
    dtype = _known(leaf.dtype)
    if dtype is None or dtype.numpy is None or dtype.torch is None:
        return f"dtype {leaf.dtype}, which does not cross: view it as an integer dtype"
    return None


def why_not_to_torch(array: Any) -> str | None:
    """Why a jax or numpy array cannot become a tensor at all, or None when it can."""
    if isinstance(array, Tracer):
        return "a tracer: convert outside of jit, vmap and grad"
    if isinstance(array, jax.Array):
        if (reason := _why_not_readable(array)) is not None:
            return reason
    elif not isinstance(array, np.ndarray):
        return f"a {type(array).__name__}, which holds no values"
    dtype = _known(array.dtype)
    if dtype is None or dtype.torch is None:
        return f"dtype {array.dtype}, which torch does not have: cast it, or view it as an integer"
    return None


def _why_not_readable(array: jax.Array) -> str | None:
    if array.is_deleted():
        return "an array that was deleted or donated"
    if not isinstance(array.dtype, np.dtype):  # an extended dtype
        return "a typed PRNG key: pass jax.random.key_data(key)"
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
    if not is_dense(tensor):
        return f"its strides {tuple(tensor.stride())} leave gaps or overlap"
    if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
        return f"it starts {tensor.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT}"
    return None


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one block of memory, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(item for item in dims if item[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def refuse(problems: Iterable[tuple[Path, str | None]], verb: str) -> None:
    """Raises one error that lists every leaf that cannot be converted.

    Args:
        problems: each leaf's path, and why it cannot be, or None.
        verb: what was tried.

    Raises:
        LeafTypeError: there is at least one.
    """
    if lines := _lines("got ", problems):
        raise LeafTypeError(f"{verb} cannot carry:\n{lines}")


def refuse_copies(copies: Iterable[tuple[Path, str | None]]) -> None:
    """Raises one error that lists every leaf that `copy=False` forbids.

    Args:
        copies: each leaf's path, and why it would be copied, or None.

    Raises:
        CopyError: there is at least one.
    """
    if lines := _lines("", copies):
        raise CopyError(
            f"copy=False, but these leaves cannot share memory:\n{lines}\n"
            "Use copy=None, or tdbridge.consolidate(td), which aligns every leaf."
        )


def _lines(prefix: str, problems: Iterable[tuple[Path, str | None]]) -> str:
    return "\n".join(
        f"  {path_str(path)}: {prefix}{reason}." for path, reason in problems if reason is not None
    )
