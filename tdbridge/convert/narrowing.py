"""64-bit leaves while JAX's x64 mode is off: narrowed exactly, or refused.

JAX itself wraps 2**31 to -2**31 and turns 1e300 into inf without a word.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from tdbridge.convert.sharing import Paths, lines, narrowed_dtype
from tdbridge.errors import NarrowingError
from tdbridge.layout.dtypes import dtype_of

Narrow = Literal["exact", "allow", "never"]


def narrowed(paths: Paths, tensors: Sequence[torch.Tensor], narrow: Narrow) -> list[torch.Tensor]:
    """The tensors, those that JAX would narrow cast to 32 bits; the others are the same objects.

    Raises:
        NarrowingError: values would be lost; the error lists every such leaf.
    """
    targets = [narrowed_dtype(tensor.dtype) for tensor in tensors]
    problems = [
        None if target is None else _problem(tensor, narrow)
        for tensor, target in zip(tensors, targets, strict=True)
    ]
    if any(problems):
        raise NarrowingError(_message(lines(paths(), problems)))
    return [
        tensor if target is None else tensor.to(dtype_of(target).in_torch)
        for tensor, target in zip(tensors, targets, strict=True)
    ]


def _problem(tensor: torch.Tensor, narrow: Narrow) -> str | None:
    name = dtype_of(tensor.dtype).name
    if narrow == "never":
        return f'got {name}, and narrow="never"'
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return None if narrow == "allow" else f"got {name}, which would be rounded"
    low, high = _range(tensor)
    bounds = torch.iinfo(torch.int32 if tensor.dtype == torch.int64 else torch.uint32)
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
