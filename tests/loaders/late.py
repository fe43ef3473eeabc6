"""A device whose copies are late, and that sees what would corrupt them."""

import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from tdbridge.loaders.streams import Sent


class LateEvent:
    def __init__(self, side: "LateSide") -> None:
        self.side, self.done = side, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        while not self.done:
            self.side.run_one()


class LateSide:
    """Reads host memory only when somebody waits for a copy, or the test calls `run_one`.

    It keeps no host memory alive itself: a copy from what was freed fails.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.pinned: list[Tensor] = []  # what was pinned by `pin`
        self.elsewhere: list[Tensor] = []  # pinned by others
        self.arrived: list[Tensor] = []  # on the device
        self.transfers: list[int] = []  # the bytes of each copy
        self.queue: deque = deque()
        self.fails = False

    def pin(self, nbytes: int) -> Tensor:
        self.pinned.append(torch.full((nbytes,), 0xEE, dtype=torch.uint8))
        return self.pinned[-1]

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_contiguous() and _inside(tensor, self.elsewhere)

    def holds(self, tensor: Tensor) -> bool:
        return _inside(tensor, self.arrived)

    def send(self, hosts: Sequence[Tensor]) -> Sent:
        if self.fails:
            raise RuntimeError("the copy failed")
        assert all(_inside(host, self.pinned + self.elsewhere) or not len(host) for host in hosts)
        new = [torch.full_like(host, 13) for host in hosts]
        sent = Sent(new, LateEvent(self))
        self.queue.append((sent, [weakref.ref(host) for host in hosts]))
        self.arrived += new
        self.transfers += [host.nbytes for host in hosts]
        return sent

    def run_one(self) -> None:
        sent, hosts = self.queue.popleft()
        for new, host in zip(sent.tensors, hosts, strict=True):
            source = host()
            assert source is not None, "host memory was freed before its copy"
            new.copy_(source)
        sent.event.done = True

    def receive(self, sent: Sent) -> None:
        sent.event.synchronize()


def _inside(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    storage = tensor.untyped_storage().data_ptr()
    return tensor.numel() > 0 and any(storage == o.untyped_storage().data_ptr() for o in others)
