"""A ring of pinned buffers: one is written to again only when its last copy is done.

A buffer that is reused too early corrupts a batch silently: the copy to the device reads host
memory long after the call that started it has returned.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tdbridge.layout.buffer import views_of
from tdbridge.layout.spec import Layout


class Event(Protocol):
    """What has to happen on the device before host memory is free again: `torch.Event` is one."""

    def query(self) -> bool:
        """Whether it has happened."""
        ...

    def synchronize(self) -> Any:
        """Waits until it has happened."""
        ...


@dataclass(slots=True)
class Slot:
    """A pinned buffer, laid out for one tree.

    Attributes:
        buffer: uint8, one-dimensional, as large as the largest tree that it was asked for.
        layout: the tree that it was laid out for last.
        storage: the first `layout.nbytes` of the buffer, the padding in them zero.
        views: one view of it per leaf of the layout, in its order.
    """

    buffer: Tensor
    layout: Layout
    storage: Tensor
    views: list[Tensor]


class Ring:
    """At most `slots` pinned buffers, each of which grows to the largest layout it is asked for.

    Batches of changing shapes, such as the last one of an epoch, share the buffers: a new one is
    pinned only while there are fewer than `slots`, or when the layout does not fit.

    Args:
        pin: makes a pinned uint8 tensor of so many bytes.
        slots: the most buffers that are kept.
    """

    def __init__(self, pin: Callable[[int], Tensor], slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots is at least 1, got {slots}.")
        self._pin, self._most = pin, slots
        self._given: deque[tuple[Slot, Event]] = deque()  # the oldest copy first

    def take(self, layout: Layout) -> Slot:
        """A slot laid out for `layout`, which no copy reads any more.

        Waits for the oldest copy when every slot has one in flight. The slot is out of the ring
        until `give`: one whose copy failed is not given, and never used again.
        """
        if len(self._given) < self._most and not (self._given and self._given[0][1].query()):
            return self._new(layout)
        slot, event = self._given[0]
        event.synchronize()
        self._given.popleft()
        if slot.buffer.numel() < layout.nbytes:
            return self._new(layout)
        return slot if slot.layout == layout else _laid_out(slot.buffer, layout)

    def give(self, slot: Slot, event: Event) -> None:
        """Puts a slot back, to be taken again when `event` is done."""
        self._given.append((slot, event))

    def _new(self, layout: Layout) -> Slot:
        # A power of two, so that growing shapes do not pin anew for each batch; torch's own
        # allocator of pinned memory rounds up to it anyway.
        return _laid_out(self._pin(1 << max(layout.nbytes - 1, 0).bit_length()), layout)


def _laid_out(buffer: Tensor, layout: Layout) -> Slot:
    storage = buffer[: layout.nbytes].zero_()
    return Slot(buffer, layout, storage, views_of(layout, storage))
