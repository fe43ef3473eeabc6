"""Pinned buffers are reused, and never while a copy still reads them."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdbridge import layout_of
from tdbridge.loaders.ring import Ring
from tests.loaders.late import LateEvent, LateSide


def layout(*sizes: int):
    return layout_of(TensorDict({str(i): torch.zeros(n) for i, n in enumerate(sizes)}))


def copy_number(ring: Ring, side: LateSide, number: int, size: int = 16):
    """Sends a leaf full of one number through the ring."""
    slot = ring.take(layout(size))
    slot.views[0].fill_(number)
    sent = side.send([slot.storage])
    ring.give(slot, sent.event)
    return sent


def numbers_of(sent, size: int = 16) -> np.ndarray:
    return sent.tensors[0].numpy()[: 4 * size].view(np.float32)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_copies_that_are_late_arrive_as_they_were_sent(slots):
    side = LateSide()
    ring = Ring(side.pin, slots)
    sent = [copy_number(ring, side, number) for number in range(10)]
    assert len(side.queue) == slots  # the others were waited for
    while side.queue:
        side.run_one()
    for number, copies in enumerate(sent):
        np.testing.assert_array_equal(numbers_of(copies), np.full(16, number, np.float32))
    assert len(side.pinned) == slots


def test_a_slot_reused_too_early_would_be_seen(monkeypatch):
    """The late device tells: without the wait, the same copies arrive wrong."""
    monkeypatch.setattr(LateEvent, "synchronize", lambda self: None)
    side = LateSide()
    ring = Ring(side.pin, 2)
    sent = [copy_number(ring, side, number) for number in range(3)]
    while side.queue:
        side.run_one()
    assert numbers_of(sent[0])[0] == 2


def test_one_buffer_is_enough_while_copies_are_done_in_time():
    side = LateSide()
    ring = Ring(side.pin, 4)
    for number in range(10):
        copy_number(ring, side, number)
        side.run_one()
    assert len(side.pinned) == 1


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_changing_layouts_share_the_buffers(slots):
    """A last batch that is smaller, and every shape that comes again, pin nothing."""
    side = LateSide()
    ring = Ring(side.pin, slots)
    sizes = [100, 7, 64, 100, 1, 33] * 4
    sent = [copy_number(ring, side, number, size) for number, size in enumerate(sizes)]
    while side.queue:
        side.run_one()
    for number, (copies, size) in enumerate(zip(sent, sizes, strict=True)):
        np.testing.assert_array_equal(numbers_of(copies, size), np.full(size, number, np.float32))
    # Every slot grows once at most from the power of two above 4 bytes to that above 400.
    assert slots <= len(side.pinned) <= 2 * slots


def test_growing_layouts_pin_a_few_times_only():
    side = LateSide()
    ring = Ring(side.pin, 1)
    for size in range(1, 1001):
        copy_number(ring, side, size, size)
    assert [len(buffer) for buffer in side.pinned] == [64, 128, 256, 512, 1024, 2048, 4096]


def test_the_padding_is_zero_whatever_was_there_before():
    side = LateSide()
    ring = Ring(side.pin, 1)
    copy_number(ring, side, 1.5, 64)  # type: ignore[arg-type]
    slot = ring.take(layout(1, 1))
    for view in slot.views:
        view.fill_(2)
    expected = np.zeros(32, np.float32)
    expected[[0, 16]] = 2
    np.testing.assert_array_equal(slot.storage.numpy().view(np.float32), expected)


def test_a_slot_that_is_not_given_back_is_never_used_again():
    side = LateSide()
    ring = Ring(side.pin, 1)
    lost = ring.take(layout(16))
    sent = copy_number(ring, side, 3)
    assert ring.take(layout(16)).buffer.data_ptr() != lost.buffer.data_ptr()
    assert sent.event.query()


def test_a_ring_has_at_least_one_slot():
    with pytest.raises(ValueError, match="slots is at least 1, got 0"):
        Ring(LateSide().pin, 0)
