"""What is asked of torch's streams, in which order; what they do is tested with a GPU."""

from types import SimpleNamespace

import pytest
import torch

from tdbridge.loaders.streams import Sent, SideStream


class Stream:
    """Notes what happens to it."""

    def __init__(self, *_) -> None:
        self.calls: list = []

    def __enter__(self) -> None:
        self.calls.append("enter")

    def __exit__(self, *_) -> None:
        self.calls.append("exit")

    def record_event(self) -> str:
        self.calls.append("record_event")
        return "event"

    def wait_event(self, event: str) -> None:
        self.calls.append(("wait_event", event))


@pytest.fixture
def side(monkeypatch) -> SideStream:
    monkeypatch.setattr(torch, "Stream", Stream)
    return SideStream(torch.device("cpu"))


def test_copies_start_on_the_side_stream_and_their_event_is_recorded_after_them(side):
    class Host:
        def to(self, device, non_blocking):
            side._stream.calls.append(("to", device.type, non_blocking))
            return "there"

    assert side.send([Host(), Host()]) == (["there", "there"], "event")
    copy = ("to", "cpu", True)
    assert side._stream.calls == ["enter", copy, copy, "record_event", "exit"]


def test_the_current_stream_waits_and_then_owns_each_storage_once(side, monkeypatch):
    current = Stream()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current)
    record = SimpleNamespace(
        record_stream=lambda stream: stream.calls.append(("record_stream", stream is current))
    )
    side.receive(Sent([record, record], "event"))  # pyright: ignore[reportArgumentType]
    owned = ("record_stream", True)
    assert current.calls == [("wait_event", "event"), owned, owned]
    assert side._stream.calls == []


def test_strided_memory_is_no_transfer_of_its_own(side, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    x = torch.zeros(4, 4)
    assert [side.is_pinned(t) for t in (x, x[1:], x.T)] == [True, True, False]
