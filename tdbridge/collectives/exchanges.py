"""broadcast, all_gather, gather, scatter and all_to_all over torch.distributed: whole buffers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tdbridge.collectives.agreement import Check, agree, taking_part
from tdbridge.collectives.groups import Members
from tdbridge.collectives.handle import Handle, told
from tdbridge.collectives.reductions import pieces_of
from tdbridge.collectives.stacks import (
    all_carried,
    given_back,
    parts_of,
    rows_for,
    rows_under,
    same_leaves,
)
from tdbridge.collectives.trees import Carried, arrived, carried, new_buffer


def broadcast(tree: Any, src: int, members: Members, check: Check, to: str) -> Handle:
    """See `tdbridge.collectives.broadcast`; `src` counts within the group."""
    call = f"broadcast(src={members.ranks[src]})"
    with taking_part(members, call, check, src):
        own = None if tree is None else carried(tree, members, written=members.rank != src)
    # A member without a tree would take shards for whole tensors: its call is another one.
    call = call if own is None else own.named(call)
    layout = agree(members, call, own and own.layout, check, root=src)
    storage = own.storage if own is not None else new_buffer(layout, members)
    with told(call, members):
        works = [
            dist.broadcast(piece, group_src=src, group=members.group, async_op=True)
            for piece in pieces_of(storage)
        ]
    if own is None:
        return Handle(call, members, works, partial(arrived, layout, storage, to))
    finish = (lambda: tree) if members.rank == src else partial(own.update, own.whole)
    return Handle(call, members, works, finish)


def all_gather(tree: Any, members: Members, stacked: bool, check: Check, out: Any = None) -> Handle:
    """See `tdbridge.collectives.all_gather`."""
    call = "all_gather()"
    with taking_part(members, call, check):
        own = carried(tree)
        rows = None if out is None else rows_under(out, own, members.size)
    agree(members, call, own.layout, check)
    buffers = _buffers(own, members.size, stacked) if rows is None else rows
    works: list[Any] = []
    if own.storage.numel():
        with told(call, members):
            work = dist.all_gather(list(buffers), own.storage, members.group, async_op=True)
        works.append(work)
    finish = partial(given_back, own, buffers, stacked) if rows is None else lambda: out
    return Handle(call, members, works, finish)


def gather(tree: Any, dst: int, members: Members, stacked: bool, check: Check) -> Handle:
    """See `tdbridge.collectives.gather`; `dst` counts within the group."""
    call = f"gather(dst={members.ranks[dst]})"
    with taking_part(members, call, check):
        own = carried(tree)
    agree(members, call, own.layout, check)
    here = members.rank == dst
    buffers = _buffers(own, members.size, stacked) if here else None
    works: list[Any] = []
    if own.storage.numel():
        with told(call, members):
            into = list(buffers) if buffers is not None else None
            work = dist.gather(own.storage, into, group_dst=dst, group=members.group, async_op=True)
        works.append(work)
    if buffers is None:
        return Handle(call, members, works, lambda: None)
    return Handle(call, members, works, partial(given_back, own, buffers, stacked))


def scatter(tree: Any, trees: Any, src: int, members: Members, check: Check, to: str) -> Handle:
    """See `tdbridge.collectives.scatter`; `src` counts within the group."""
    call = f"scatter(src={members.ranks[src]})"
    here = members.rank == src
    with taking_part(members, call, check, src):
        own = None if tree is None else carried(tree, written=True)
        every = all_carried(parts_of(trees, members.size, "scatter"), "scatter") if here else None
        if own is not None and every is not None:
            same_leaves(own, every[0], "scatter: the tree to be written to")
    known = own if own is not None or every is None else every[src]
    layout = agree(members, call, known.layout if known else None, check, root=src)
    storage = own.storage if own is not None else new_buffer(layout, members)
    works: list[Any] = []
    if storage.numel():
        with told(call, members):
            sources = [one.storage for one in every] if every else None
            work = dist.scatter(storage, sources, group_src=src, group=members.group, async_op=True)
        works.append(work)
    if own is not None:
        return Handle(call, members, works, partial(own.update, own.whole))
    if every:
        return Handle(call, members, works, partial(_one_like, every[src], storage))
    return Handle(call, members, works, partial(arrived, layout, storage, to))


def all_to_all(trees: Any, members: Members, stacked: bool, check: Check) -> Handle:
    """See `tdbridge.collectives.all_to_all`."""
    call = "all_to_all()"
    with taking_part(members, call, check):
        every = all_carried(parts_of(trees, members.size, "all_to_all"), "all_to_all")
    own = every[members.rank]
    agree(members, call, own.layout, check)
    rows = rows_for(own, members.size)
    works: list[Any] = []
    if own.storage.numel():
        with told(call, members):
            sent = torch.cat([one.storage for one in every])
            work = dist.all_to_all_single(rows.view(-1), sent, group=members.group, async_op=True)
        works.append(work)

    def finish() -> Any:
        buffers = rows if stacked else [row.clone() for row in rows]
        return given_back(own, buffers, stacked)

    return Handle(call, members, works, finish)


def _buffers(own: Carried, count: int, stacked: bool) -> Tensor | Sequence[Tensor]:
    """Rows of one, or each of its own, as a consolidated tree has it."""
    return (
        rows_for(own, count) if stacked else [torch.empty_like(own.storage) for _ in range(count)]
    )


def _one_like(tree: Carried, storage: Tensor) -> Any:
    return given_back(tree, [storage], stacked=False)[0]
