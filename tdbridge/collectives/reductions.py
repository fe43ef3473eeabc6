"""all_reduce, reduce and reduce_scatter over torch.distributed: a message per dtype segment."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tdbridge.collectives.agreement import Check, agree, taking_part
from tdbridge.collectives.groups import Members
from tdbridge.collectives.handle import Handle, told
from tdbridge.collectives.ops import MAX, MEAN, MIN, PRODUCT, SUM, Op
from tdbridge.collectives.stacks import all_carried, parts_of
from tdbridge.collectives.trees import Carried, carried, whole_like
from tdbridge.collectives.wire import Where, Wire, takes_part, wire_for
from tdbridge.errors import CollectiveError, LeafTypeError
from tdbridge.layout.dtypes import DType, dtype_of
from tdbridge.layout.placement import segments_of
from tdbridge.layout.spec import Layout, path_str

CHUNK = 2**22
"""Bytes in one message: longer segments go in several, all in flight at once."""

_TORCH = {
    SUM: dist.ReduceOp.SUM,
    MEAN: dist.ReduceOp.SUM,  # gloo's own mean is one of floats alone
    MAX: dist.ReduceOp.MAX,
    MIN: dist.ReduceOp.MIN,
    PRODUCT: dist.ReduceOp.PRODUCT,
}


def all_reduce(
    tree: Any, op: Op, members: Members, where: Where | None, accumulate: Any, check: Check
) -> Handle:
    """See `tdbridge.collectives.all_reduce`."""
    wide = wide_of(accumulate)
    call = call_of("all_reduce", op, wide)
    with taking_part(members, call, check):
        own = carried(tree, members, written=True)
        chosen, left_out = chosen_segments(own.layout, op, wide, where)
    agree(members, own.named(call), own.layout, check, left_out=left_out)
    wires = _wires(own.layout, own.placement.segments, chosen, op, members, wide)
    with told(call, members):
        works = [
            dist.all_reduce(piece, op=_TORCH[op.name], group=members.group, async_op=True)
            for wire in wires
            for piece in pieces_of(wire.sent)
        ]
    return Handle(call, members, works, partial(_update, own, wires))


def reduce(
    tree: Any, dst: int, op: Op, members: Members, where: Where | None, accumulate: Any,
    check: Check,
) -> Handle:  # fmt: skip
    """See `tdbridge.collectives.reduce`; `dst` counts within the group."""
    wide = wide_of(accumulate)
    call = call_of("reduce", op, wide, dst=members.ranks[dst])
    with taking_part(members, call, check):
        own = carried(tree, members, written=members.rank == dst)
        chosen, left_out = chosen_segments(own.layout, op, wide, where)
    agree(members, own.named(call), own.layout, check, left_out=left_out)
    # What the engine leaves in the buffers of the others is undefined.
    here = members.rank == dst
    flats = own.placement.segments if here else segments_of(own.layout, own.storage.clone())
    wires = _wires(own.layout, flats, chosen, op, members, wide)
    with told(call, members):
        works = [
            dist.reduce(
                piece, group_dst=dst, op=_TORCH[op.name], group=members.group, async_op=True
            )
            for wire in wires
            for piece in pieces_of(wire.sent)
        ]
    finish = partial(_update, own, wires) if here else lambda: None
    return Handle(call, members, works, finish)


def reduce_scatter(
    trees: Any, op: Op, members: Members, where: Where | None, accumulate: Any, check: Check
) -> Handle:
    """See `tdbridge.collectives.reduce_scatter`."""
    wide = wide_of(accumulate)
    call = call_of("reduce_scatter", op, wide)
    with taking_part(members, call, check):
        every = all_carried(parts_of(trees, members.size, "reduce_scatter"), "reduce_scatter")
        own = every[members.rank]
        chosen, left_out = chosen_segments(own.layout, op, wide, where)
    agree(members, call, own.layout, check, left_out=left_out)
    storage = own.storage.clone()
    flats = segments_of(own.layout, storage)
    wires = _wires(own.layout, flats, chosen, op._replace(factor=1.0), members, wide)
    works = []
    with told(call, members):
        for i, wire in zip(chosen, wires, strict=True):
            dtype = dtype_of(own.layout.segments[i].dtype)
            sources = [one.placement.segments[i].clone() for one in every]
            sent = [wire_for(source, dtype, op, members.size, wide).sent for source in sources]
            works.append(
                dist.reduce_scatter_tensor(
                    wire.sent,
                    torch.cat(sent),
                    op=_TORCH[op.name],
                    group=members.group,
                    async_op=True,
                )
            )

    def finish() -> Any:
        for wire in wires:
            wire.received()
        return own.like(whole_like(own, storage))

    return Handle(call, members, works, finish)


def _update(own: Carried, wires: Sequence[Wire]) -> Any:
    for wire in wires:
        wire.received()
    return own.update(own.whole)


def call_of(name: str, op: Op, wide: DType | None, **more: Any) -> str:
    """The call with the arguments that have to be equal on all members."""
    said = {"op": op.name, "accumulate": wide and wide.name, **more}
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in said.items() if v is not None)})"


def wide_of(accumulate: Any) -> DType | None:
    """The dtype that `accumulate=` names.

    Raises:
        CollectiveError: it is no floating-point dtype.
    """
    if accumulate is None:
        return None
    try:
        wide = dtype_of(accumulate)
    except LeafTypeError:
        wide = None
    if wide is None or wide.torch is None or not wide.torch.is_floating_point:
        raise CollectiveError(
            f"got accumulate={accumulate!r}: pass a floating-point dtype, such as 'float32'."
        )
    return wide


def pieces_of(flat: Tensor) -> Sequence[Tensor]:
    """A segment, or a buffer, as messages of at most `CHUNK` bytes; none if it is empty."""
    if not flat.numel():
        return ()
    return flat.split(max(CHUNK // (flat.element_size() * flat[0].numel()), 1))


def _wires(
    layout: Layout, flats: Sequence[Tensor], chosen: Sequence[int], op: Op, members: Members,
    wide: DType | None,
) -> list[Wire]:  # fmt: skip
    dtypes = [dtype_of(segment.dtype) for segment in layout.segments]
    return [wire_for(flats[i], dtypes[i], op, members.size, wide) for i in chosen]


@lru_cache(maxsize=256)
def chosen_segments(
    layout: Layout, op: Op, wide: DType | None, where: Where | None
) -> tuple[tuple[int, ...], frozenset[str]]:
    """The segments that are reduced, and the dtypes that are not.

    Raises:
        CollectiveError: the leaves of one cannot be; it names the first of them.
    """
    first = {leaf.dtype: leaf.path for leaf in reversed(layout.leaves)}
    chosen, left_out = [], set[str]()
    for i, segment in enumerate(layout.segments):
        path = path_str(first[segment.dtype])
        if takes_part(dtype_of(segment.dtype), op, wide, where, path):
            if segment.nbytes:
                chosen.append(i)
        else:
            left_out.add(segment.dtype)
    return tuple(chosen), frozenset(left_out)
