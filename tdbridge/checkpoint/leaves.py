"""One leaf as a torch tensor or as a numpy array, sharing its memory where that is possible.

Everything is bits here: no value is converted, so NaN payloads and negative zeros stay as they are.
"""

import warnings
from typing import Any

import jax
import numpy as np
import torch

from tdbridge._compat.torch import why_not_dense
from tdbridge.convert.dlpack import numpy_view
from tdbridge.errors import CheckpointError, LeafTypeError
from tdbridge.layout.dtypes import DType, dtype_of

# Exactly these: a subclass (an enum, a numpy scalar) would come back as its base.
_SCALARS = (bool, int, float, str, type(None))


def is_scalar(leaf: Any) -> bool:
    """Whether a leaf is a plain Python value that both engines can hold."""
    return type(leaf) in _SCALARS


def is_array(leaf: Any) -> bool:
    """Whether a leaf is a torch tensor, a numpy array or scalar, or a JAX array."""
    return isinstance(leaf, torch.Tensor | np.ndarray | np.generic | jax.Array)


def as_tensor(leaf: Any, where: str) -> torch.Tensor:
    """Gives a leaf as a plain tensor of the same dtype, shape and bits.

    A tensor keeps its memory, strides and device; an array shares its memory when it is
    C-contiguous.

    Raises:
        CheckpointError: not an array, or of a dtype that torch lacks.
    """
    if isinstance(leaf, torch.Tensor):
        return _plain(leaf, where)
    array = _native(leaf, where)
    row = _row(array.dtype, where)
    if row.torch is None:
        raise CheckpointError(
            f"{where}: got dtype {row.name}, which torch has not. Cast it, or stay with numpy: "
            'save with format="orbax", load with to="numpy".'
        )
    flat = array.reshape(-1).view(np.uint8)
    with warnings.catch_warnings():
        # A read-only array is fine: what is made here is written to a file, not changed.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(flat).view(row.torch).reshape(array.shape)


def as_array(leaf: Any, where: str) -> np.ndarray:
    """Gives a leaf as a numpy array (ml_dtypes for bfloat16 and float8) of the same bits.

    C-contiguous memory on the host is shared.

    Raises:
        CheckpointError: not an array, or of a dtype that numpy lacks.
    """
    if not isinstance(leaf, torch.Tensor):
        return _native(leaf, where)
    row = _row(leaf.dtype, where)
    if row.numpy is None:
        raise CheckpointError(
            f"{where}: got dtype {row.name}, which numpy has not. Cast it, or stay with torch: "
            'save with format="dcp", load with to="torch".'
        )
    return numpy_view(_plain(leaf, where).cpu().contiguous())


def _plain(tensor: torch.Tensor, where: str) -> torch.Tensor:
    reason = why_not_dense(tensor)
    if reason is not None:
        raise CheckpointError(f"{where}: got {reason}.")
    _row(tensor.dtype, where)
    # A subclass (a Parameter, a memory-mapped tensor) would be pickled with its class.
    return tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()


def _native(leaf: Any, where: str) -> np.ndarray:
    """A C-contiguous array in the byte order of this machine."""
    if not is_array(leaf):
        raise CheckpointError(
            f"{where}: got {type(leaf).__name__}, which is neither a tensor, an array nor a bool, "
            "int, float, str or None. Convert it, or leave it out."
        )
    try:
        # For a JAX array this is a view on the host, or the gathered whole of a sharded one.
        array = np.asarray(leaf)
        row = _row(array.dtype.newbyteorder("="), where)
        return np.array(array, dtype=row.numpy, order="C", copy=None)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: cannot be read as an array: {error}") from error


def _row(dtype: object, where: str) -> DType:
    try:
        return dtype_of(dtype)
    except LeafTypeError as error:
        raise CheckpointError(f"{where}: {error}") from error
