"""The reductions, by the names of both frameworks."""

from typing import Any, NamedTuple

import torch.distributed as dist

from tdbridge.errors import CollectiveError

SUM, MEAN, MAX, MIN, PRODUCT = "sum", "mean", "max", "min", "product"

_BY_TORCH = {
    dist.ReduceOp.SUM: SUM,
    dist.ReduceOp.AVG: MEAN,
    dist.ReduceOp.MAX: MAX,
    dist.ReduceOp.MIN: MIN,
    dist.ReduceOp.PRODUCT: PRODUCT,
}
_OTHER_NAMES = {"avg": MEAN, "prod": PRODUCT}


class Op(NamedTuple):
    """A reduction, and what each rank multiplies its values by before it."""

    name: str
    factor: float = 1.0


def premul_sum(factor: float) -> Op:
    """The sum of what each rank multiplies by `factor` first, as torch's `PREMUL_SUM`.

    For floating-point and complex leaves. Each rank may have a factor of its own.

    Example:
        >>> premul_sum(0.5)
        Op(name='sum', factor=0.5)
    """
    return Op(SUM, float(factor))


def op_of(op: Any) -> Op:
    """The reduction that a name, a `torch.distributed.ReduceOp` or an `Op` stands for.

    Raises:
        CollectiveError: it is none of ours; the bitwise ones have no counterpart for floats.
    """
    if isinstance(op, Op):
        return op
    if isinstance(op, str):
        name = _OTHER_NAMES.get(op.lower(), op.lower())
        if name in _BY_TORCH.values():
            return Op(name)
    else:
        for known, name in _BY_TORCH.items():
            if known == op:
                return Op(name)
    names = ", ".join(sorted(_BY_TORCH.values()))
    raise CollectiveError(f"got op={op!r}: use one of {names}, or premul_sum(factor).")
