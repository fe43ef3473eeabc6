"""A segment as what an engine can add up: the dtypes that gloo and NCCL know, and back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdbridge.cast.tensors import copy_cast
from tdbridge.collectives.ops import MEAN, PRODUCT, SUM, Op
from tdbridge.errors import CollectiveError
from tdbridge.layout.dtypes import DType

Where = Callable[[Any], bool]
"""Which leaves are reduced, told by an empty tensor of their dtype."""

_SENT = {"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"}
_WIDER = {"int16": torch.int32, "uint16": torch.int32, "uint32": torch.int64}  # exact, also modulo


class Wire(NamedTuple):
    """A segment on its way.

    Attributes:
        sent: what the engine reduces in place: the segment itself, a view of it, or a copy.
        received: writes the result to the segment.
    """

    sent: Tensor
    received: Callable[[], Any]


def wire_for(flat: Tensor, dtype: DType, op: Op, members: int, wide: DType | None) -> Wire:
    """How a segment of a dtype is reduced.

    Args:
        flat: the segment, to be overwritten with the result.
        dtype: its dtype.
        op: the reduction; `check_op` has been asked.
        members: how many take part.
        wide: the dtype that narrower floats are added up in.
    """
    if dtype.in_torch.is_complex:
        real = torch.view_as_real(flat)
        return _finished(_scaled(real, op), op, members)
    if wide is not None and dtype.in_torch.is_floating_point and wide.itemsize > dtype.itemsize:
        return _cast(flat, wide.in_torch, op, members)
    if dtype.name in _WIDER:
        return _cast(flat, _WIDER[dtype.name], op, members)
    if dtype.name == "bool":
        return Wire(flat.view(torch.uint8), _nothing)
    if dtype.name == "uint64":
        bits = flat.view(torch.int64)
        if op.name in (SUM, PRODUCT):  # the same bits, modulo 2**64
            return Wire(bits, _nothing)
        bits ^= _SIGN  # the order of unsigned numbers becomes that of signed ones
        return Wire(bits, lambda: bits.bitwise_xor_(_SIGN))
    if dtype.name not in _SENT:  # a float8, which max and min keep
        return _cast(flat, torch.float32, op, members)
    return _finished(_scaled(flat, op), op, members)


_SIGN = torch.iinfo(torch.int64).min


def _nothing() -> None:
    """The segment holds the result."""


def _scaled(flat: Tensor, op: Op) -> Tensor:
    return flat if op.factor == 1 else flat.mul_(op.factor)


def _finished(flat: Tensor, op: Op, members: int) -> Wire:
    return Wire(flat, (lambda: flat.div_(members)) if op.name == MEAN else _nothing)


def _cast(flat: Tensor, dtype: torch.dtype, op: Op, members: int) -> Wire:
    wide = _scaled(flat.to(dtype), op)

    def received() -> None:
        if op.name == MEAN:
            wide.div_(members)
        copy_cast(wide, flat)

    return Wire(wide, received)


def why_not_reduced(dtype: DType, op: Op, wide: DType | None) -> str | None:
    """Why leaves of a dtype cannot be reduced so, or None when they can."""
    torch_dtype, added = dtype.in_torch, op.name in (SUM, MEAN, PRODUCT)
    if torch_dtype.is_complex:
        return None if op.name in (SUM, MEAN) else "complex numbers have a sum and a mean alone"
    if dtype.name == "bool":
        return "booleans have max ('any') and min ('all') alone" if added else None
    if not torch_dtype.is_floating_point:
        fraction = op.name == MEAN or op.factor != 1
        return "it would round integers; leave them out by where=is_floating" if fraction else None
    if dtype.itemsize == 1 and added and wide is None:
        return "a sum in 8 bits would be lost; pass accumulate='float32'"
    return None


def check_op(dtype: DType, op: Op, wide: DType | None, where: str) -> None:
    """Checks that leaves of a dtype can be reduced so.

    Raises:
        CollectiveError: they cannot. It names one of them, `where`.
    """
    if (reason := why_not_reduced(dtype, op, wide)) is not None:
        name = op.name if op.factor == 1 else f"premul_sum({op.factor})"
        raise CollectiveError(f"{where}: got {dtype.name} with op={name!r}: {reason}.")


def takes_part(dtype: DType, op: Op, wide: DType | None, where: Where | None, path: str) -> bool:
    """Whether `where` chooses leaves of a dtype, and they can be reduced so.

    Raises:
        CollectiveError: it chooses them, and they cannot be. It names one of them, `path`.
    """
    chosen = where is None or where(torch.empty(0, dtype=dtype.in_torch))
    if chosen:
        check_op(dtype, op, wide, path)
    return chosen
