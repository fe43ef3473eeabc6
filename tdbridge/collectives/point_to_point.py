"""send and recv: a head of 24 bytes, the layout where the peer has not had it, the buffer.

The receiver knows from the head what comes before it writes anything. What it does not want is
taken off the wire all the same, so that neither side waits for the other.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tdbridge.collectives.agreement import Check
from tdbridge.collectives.differences import differences
from tdbridge.collectives.groups import Members
from tdbridge.collectives.handle import Handle, told
from tdbridge.collectives.reductions import pieces_of
from tdbridge.collectives.trees import Carried, arrived, carried, new_buffer
from tdbridge.errors import CollectiveError, LayoutError, TdbridgeError
from tdbridge.layout.spec import Layout

_MOST_TEXT = 2**31  # bytes of a layout that a peer may announce


def isend(tree: Any, dst: int, members: Members, tag: int, check: Check) -> Handle:
    """See `tdbridge.collectives.isend`; `dst` counts within the group."""
    call = f"send(dst={members.ranks[dst]})"
    _check_other(call, dst, members)
    own = carried(tree)
    messages: list[Tensor] = []
    if check != "never":
        messages += _head(own.layout, (dst, tag, own.layout.fingerprint), members)
    messages += pieces_of(own.storage)
    with told(call, members):
        works = [
            dist.isend(message, group_dst=dst, group=members.group, tag=tag) for message in messages
        ]
    # The messages live as long as they are on their way.
    return Handle(call, members, works, messages.clear)


def _head(layout: Layout, peer: tuple[int, int, str], members: Members) -> Sequence[Tensor]:
    text = b"" if peer in members.known.sent else layout.to_json().encode()
    members.known.sent.add(peer)
    numbers = [*_halves(layout.fingerprint), len(text)]
    device = members.device
    head = torch.tensor(numbers, dtype=torch.int64, device=device)
    body = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device) if text else None
    return [head] if body is None else [head, body]


def _halves(fingerprint: str) -> tuple[int, int]:
    """The first 16 bytes of a fingerprint as two numbers."""
    raw = bytes.fromhex(fingerprint)
    return int.from_bytes(raw[:8], "big", signed=True), int.from_bytes(
        raw[8:16], "big", signed=True
    )


def irecv(tree: Any, src: int | None, members: Members, tag: int, check: Check, to: str) -> Handle:
    """See `tdbridge.collectives.irecv`; `src` counts within the group, None is any member."""
    call = f"recv(src={None if src is None else members.ranks[src]})"
    _check_other(call, src, members)
    own = None if tree is None else carried(tree, written=True)
    if check == "never":
        if own is None or src is None:
            raise CollectiveError(f"{call}: with check='never', pass a tree and a src.")
        with told(call, members):
            works = _receives(own.storage, src, members, tag)
        return Handle(call, members, works, partial(own.update, own.whole))
    head = torch.empty(3, dtype=torch.int64, device=members.device)
    earlier = _earlier(src, tag, members)
    works = []
    if src is not None and not earlier:
        with told(call, members):
            works.append(dist.irecv(head, group_src=src, group=members.group, tag=tag))

    def finish() -> Any:
        # What has ended is not kept: it has the tree that came.
        pending = members.known.pending
        pending[:] = [one for one in pending if one[2] is not handle]
        for other in earlier:
            with suppress(TdbridgeError):  # whoever waits for it is told
                other.wait()
        with told(call, members):
            source = src
            if source is None:
                sender = dist.recv(head, group=members.group, tag=tag)
                source = members.ranks.index(sender)
            elif earlier:
                dist.recv(head, group_src=source, group=members.group, tag=tag)
            layout = _layout(head.tolist(), source, members, tag, call)
            return _body(call, own, layout, source, members, tag, to)

    handle = Handle(call, members, works, finish)
    members.known.pending.append((src, tag, handle))
    return handle


def _earlier(src: int | None, tag: int, members: Members) -> list[Handle]:
    """The receives that were begun before, and may get what comes from that peer first.

    What follows their head has to be taken off the wire before the next head.
    """
    pending = [one for one in members.known.pending if not one[2].has_ended]
    members.known.pending[:] = pending
    return [h for peer, own, h in pending if own == tag and (None in (src, peer) or src == peer)]


def _check_other(call: str, peer: int | None, members: Members) -> None:
    if peer == members.rank:
        raise CollectiveError(f"{call}: this is that rank itself.")


def _body(
    call: str, own: Carried | None, layout: Layout, src: int, members: Members, tag: int, to: str
) -> Any:
    same = own is not None and own.placement.layout.leaves == layout.leaves
    storage = own.storage if own is not None and same else new_buffer(layout, members)
    for work in _receives(storage, src, members, tag):
        work.wait()
    if own is None:
        return arrived(layout, storage, to)
    if not same:
        sides = {"in what was sent": layout, "in the tree": own.layout}
        raise CollectiveError(
            f"{call}: what was sent has another layout than the tree to be written to, which is as "
            f"it was. {differences(sides)}. Pass None to receive whatever is sent."
        )
    return own.update(own.whole)


def _receives(storage: Tensor, src: int, members: Members, tag: int) -> list[Any]:
    return [
        dist.irecv(piece, group_src=src, group=members.group, tag=tag)
        for piece in pieces_of(storage)
    ]


def _layout(head: Sequence[int], src: int, members: Members, tag: int, call: str) -> Layout:
    """The layout that a head announces, received or known."""
    *halves, length = head
    received, key = members.known.received, (src, tag, f"{halves}")
    if length:
        if not 0 < length < _MOST_TEXT:
            raise CollectiveError(f"{call}: got a head that no send of ours wrote: {list(head)}.")
        raw = torch.empty(length, dtype=torch.uint8, device=members.device)
        dist.recv(raw, group_src=src, group=members.group, tag=tag)
        try:
            layout = Layout.from_json(bytes(raw.tolist()).decode())
        except (LayoutError, UnicodeDecodeError) as error:
            raise CollectiveError(f"{call}: got a layout that cannot be read: {error}") from error
        if list(_halves(layout.fingerprint)) != list(halves):
            raise CollectiveError(f"{call}: got a layout of another fingerprint than announced.")
        received[key] = layout
    if key not in received:
        raise CollectiveError(
            f"{call}: got a head that no send of ours wrote, or of a layout that was sent before "
            f"this process knew of it: {list(head)}. Pass check='never' on both sides."
        )
    return received[key]
