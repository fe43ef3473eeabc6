"""A batch on its way to an accelerator: one transfer from pinned memory, on a side stream."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor

from tdbridge._compat.torch import all_plain, why_not_dense
from tdbridge.convert.leaves import replace_some, take_apart
from tdbridge.convert.sharing import Paths, refuse
from tdbridge.convert.to_torch import to_torch
from tdbridge.errors import LeafTypeError
from tdbridge.layout.buffer import buffer_under, check_nodes, declare, planned, views_of
from tdbridge.layout.fill import fill
from tdbridge.layout.plan import Plan
from tdbridge.layout.spec import Layout
from tdbridge.layout.tree import Node, rebuild, tree_of
from tdbridge.loaders.ring import Event, Ring, Slot
from tdbridge.loaders.streams import Sent, Side, SideStream

Receive = Callable[[], Any]


class Uploads:
    """Copies batches to an accelerator, each in one transfer from a ring of pinned buffers.

    A call starts the copy of a batch on a side stream and does not wait for it. One thread calls;
    what a call returns may be called in another one.

    How a batch goes:
        * leaves in pageable memory are written to a pinned buffer of the ring, and from there
          copied in one transfer; of a consolidated tree that writing is one copy too;
        * a consolidated tree whose buffer is pinned is one transfer as it is;
        * other leaves that are pinned, as `DataLoader(pin_memory=True)` pins them one by one, are
          transferred one by one, and not pinned a second time;
        * what lies on the device already, and what is no array, stays as it is.

    Pinned memory that is not of the ring is kept alive until its copy is done, or until `close`.

    Args:
        device: the accelerator.
        slots: the pinned buffers, so the copies that can be in flight before a call waits.
        side: stands for the device, in tests.

    Example:
        >>> uploads = Uploads(torch.device("cuda"), slots=2)  # doctest: +SKIP
        >>> receive = uploads({"x": torch.ones(3)})  # doctest: +SKIP
        >>> receive()["x"].device  # doctest: +SKIP
        device(type='cuda', index=0)
    """

    def __init__(self, device: torch.device, slots: int, side: Side | None = None) -> None:
        self._side: Side = SideStream(device) if side is None else side
        self._ring = Ring(self._side.pin, slots)
        self._kept: deque[tuple[Event, Sequence[Tensor]]] = deque()  # the oldest copy first

    def __call__(self, batch: Any) -> Receive:
        """Starts the copy of a batch.

        Args:
            batch: a TensorDict, a tensorclass, or any pytree with tensors, arrays or those in it.
                The memory of pageable leaves is read before the call returns, that of pinned ones
                later: it must not be written to before the batch has been received and used.

        Returns:
            A function of no arguments, to be called once, in the thread that is going to use the
            batch. It makes the current stream of that thread wait for the copy, and returns the
            same tree with its tensors on the device; a TensorDict or a tensorclass consolidated
            and locked, unless its leaves came one by one. Parameters are a TensorDict there.

        Raises:
            LeafTypeError: a leaf is not a dense tensor, or an array that cannot become one; the
                error names it.
        """
        whole = self._whole(batch) if is_tensor_collection(batch) else None
        return whole or self._leaf_by_leaf(to_torch(batch))

    def close(self) -> None:
        """Waits until no copy reads pinned memory that is not of the ring."""
        while self._kept:
            self._kept[0][0].synchronize()
            self._kept.popleft()

    def _whole(self, td: Any) -> Receive | None:
        """Sends a tree that lies, or is going to lie, in one buffer; None for any other one."""
        try:
            check_nodes(tree := tree_of(td))
            leaves, plan = planned(tree)
        except LeafTypeError:
            return None
        if leaves and all(map(self._side.holds, leaves)):
            return lambda: td
        sent = self._buffer_sent(td, plan, leaves)
        if sent is None:
            return None
        (storage,) = sent.tensors
        views = views_of(plan.layout, storage)
        new = self._rebuild(tree, iter([views[i] for i in plan.order]))
        batch = declare(new, tree, plan, storage, views)
        return self._received([sent], lambda: batch)

    def _buffer_sent(self, td: Any, plan: Plan, leaves: Sequence[Tensor]) -> Sent | None:
        side = self._side
        if any(map(side.holds, leaves)):
            return None
        storage = buffer_under(td, plan.layout, plan.order, leaves)
        if storage is None:
            pinned = any(map(side.is_pinned, leaves))
            return None if pinned else self._filled(plan.layout, plan.placed(leaves))
        if side.is_pinned(storage):
            return self._direct([storage])
        return self._through_ring(plan.layout, lambda slot: slot.storage.copy_(storage))

    def _leaf_by_leaf(self, batch: Any) -> Receive:
        """Sends the tensors of any pytree: the pinned ones as they are, the others together."""
        parts = take_apart(batch)
        sent: list[Sent] = []

        def convert(leaves: Sequence[Tensor], paths: Paths) -> list[Tensor]:
            if not all_plain(leaves):
                refuse(paths, [*map(why_not_dense, leaves)], "an upload")
            return self._each(leaves, sent)

        new = replace_some(parts, lambda kind, _: issubclass(kind, Tensor), convert)
        # When the batch has arrived: a container of the user may compute as it is made.
        return self._received(sent, lambda: parts.put_together(new, self._rebuild))

    def _each(self, leaves: Sequence[Tensor], sent: list[Sent]) -> list[Tensor]:
        side, new = self._side, list(leaves)
        away = [i for i, leaf in enumerate(leaves) if not side.holds(leaf)]
        pinned = [i for i in away if side.is_pinned(leaves[i])]
        if pinned:
            sent.append(self._direct([leaves[i] for i in pinned]))
            _put(new, pinned, sent[-1].tensors)
        pageable = sorted({*away}.difference(pinned))
        if pageable:
            own, plan = planned(_flat([leaves[i] for i in pageable]))
            sent.append(self._filled(plan.layout, plan.placed(own)))
            views = views_of(plan.layout, sent[-1].tensors[0])
            _put(new, pageable, [views[i] for i in plan.order])
        return new

    def _direct(self, hosts: Sequence[Tensor]) -> Sent:
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
        sent = self._side.send(hosts)
        self._kept.append((sent.event, hosts))
        return sent

    def _filled(self, layout: Layout, leaves: Sequence[Tensor]) -> Sent:
        return self._through_ring(
            layout, lambda slot: fill(layout, slot.storage, slot.views, leaves)
        )

    def _through_ring(self, layout: Layout, write: Callable[[Slot], Any]) -> Sent:
        slot = self._ring.take(layout)
        write(slot)
        sent = self._side.send([slot.storage])
        self._ring.give(slot, sent.event)
        return sent

    def _received(self, sent: Sequence[Sent], batch: Callable[[], Any]) -> Receive:
        def receive() -> Any:
            for copies in sent:
                self._side.receive(copies)
            return batch()

        return receive

    def _rebuild(self, node: Node, leaves: Iterator[Any]) -> Any:
        # `to` moves nothing any more: it says where the tree is, at each of its nodes.
        device = self._side.device
        return rebuild(node, leaves, device).to(device, non_blocking=True)


def _flat(leaves: Sequence[Tensor]) -> Node:
    """A node of these leaves."""
    keys = tuple(map(str, range(len(leaves))))
    return Node(leaves, dict, (), None, (), keys, list(leaves), ())


def _put(target: list[Tensor], positions: Sequence[int], tensors: Sequence[Tensor]) -> None:
    for i, tensor in zip(positions, tensors, strict=True):
        target[i] = tensor
