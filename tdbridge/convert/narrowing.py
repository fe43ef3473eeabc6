"""64-bit leaves while JAX's x64 mode is off: narrowed exactly, or refused.

JAX itself wraps 2**31 to -2**31 and turns 1e300 into inf without a word.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from tdbridge.convert.copies import packs
from tdbridge.convert.sharing import Paths, lines, narrowed_dtype
from tdbridge.errors import NarrowingError
from tdbridge.layout.dtypes import dtype_of

Narrow = Literal["exact", "allow", "never"]


def check_narrow_argument(narrow: str) -> None:
    """Raises a ValueError for anything but one of these words."""
    if narrow not in ("exact", "allow", "never"):
        raise ValueError(f'narrow is "exact", "allow" or "never", got {narrow!r}.')


def check_narrow(paths: Paths, tensors: Sequence[torch.Tensor], narrow: Narrow) -> None:
    """Sees that no tensor that JAX would narrow to 32 bits loses values by it.

    Raises:
        NarrowingError: values would be lost; the error lists every such leaf.
    """
    wide = {dtype for dtype in {t.dtype for t in tensors} if narrowed_dtype(dtype)}
    if all(_all_fit([t for t in tensors if t.dtype == dtype], narrow) for dtype in wide):
        return
    problems = [_problem(t, narrow) if t.dtype in wide else None for t in tensors]
    raise NarrowingError(_message(lines(paths(), problems)))


def _all_fit(tensors: Sequence[torch.Tensor], narrow: Narrow) -> bool:
    """Whether tensors of one 64-bit dtype can be narrowed; small ones are read at once."""
    if tensors[0].dtype not in _BOUNDS or narrow == "never":  # then the dtype alone decides
        return _problem(tensors[0], narrow) is None
    return all(_problem(_joined([tensors[i] for i in p]), narrow) is None for p in packs(tensors))


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*map(torch.flatten, tensors)])


_BOUNDS = {torch.int64: torch.iinfo(torch.int32), torch.uint64: torch.iinfo(torch.uint32)}


def _problem(tensor: torch.Tensor, narrow: Narrow) -> str | None:
    name = dtype_of(tensor.dtype).name
    if narrow == "never":
        return f'got {name}, and narrow="never"'
    if tensor.dtype not in _BOUNDS:
        return None if narrow == "allow" else f"got {name}, which would be rounded"
    low, high = _range(tensor)
    bounds = _BOUNDS[tensor.dtype]
    if bounds.min <= low and high <= bounds.max:
        return None
    # Not even narrow="allow" wraps an integer: that is no rounding.
    return f"got {name} with values from {low} to {high}, which do not fit in 32 bits"


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    if tensor.dtype == torch.int64:
        low, high = torch.aminmax(tensor)
        return int(low), int(high)
    # torch has no minimum of uint64: flipping the top bit keeps the order under int64's.
    low, high = torch.aminmax(tensor.view(torch.int64) ^ torch.iinfo(torch.int64).min)
    return int(low) + 2**63, int(high) + 2**63


def _message(problems: str) -> str:
    return (
        f"64-bit leaves do not fit in JAX while x64 is off:\n{problems}\n"
        'Turn x64 on (jax.config.update("jax_enable_x64", True), or `with jax.enable_x64(True):`), '
        'cast the leaf in torch first, or pass narrow="allow", which rounds floating-point leaves.'
    )
