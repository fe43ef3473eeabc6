"""The side stream of an accelerator: what the device does, and nothing of trees.

Everything is of `torch.Stream` and `torch.Event`, which serve CUDA, ROCm, XPU and others alike.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tdbridge.loaders.ring import Event


class Sent(NamedTuple):
    """Copies on their way: the tensors on the device, and the event that all of them are there."""

    tensors: list[Tensor]
    event: Event


class Side(Protocol):
    """What `Uploads` asks of a device; tests put one in its place whose copies are late."""

    device: torch.device

    def pin(self, nbytes: int) -> Tensor:
        """A new pinned tensor of uint8."""
        ...

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a copy from `tensor` needs no pinned buffer in between."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies on the device already."""
        ...

    def send(self, hosts: Sequence[Tensor]) -> Sent:
        """Starts one copy per pinned tensor, which must not be written to before the event."""
        ...

    def receive(self, sent: Sent) -> None:
        """Makes the caller's current stream wait for the copies, and the owner of the tensors."""
        ...


class SideStream:
    """A `Side` on a stream of its own, beside the one that computes.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        # "cuda" is "cuda:0": an empty tensor tells.
        self.device = torch.empty(0, device=device).device
        self._stream = torch.Stream(self.device)

    def pin(self, nbytes: int) -> Tensor:
        """A new pinned tensor of uint8."""
        with self._stream:  # not of the device that happens to be the thread's current one
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a copy from `tensor` is one transfer from pinned memory."""
        # Of strided memory torch would make a pageable copy first.
        return tensor.is_contiguous() and tensor.is_pinned()

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies on the device already."""
        return tensor.device == self.device

    def send(self, hosts: Sequence[Tensor]) -> Sent:
        """Starts one copy per pinned tensor on the side stream."""
        with self._stream, torch.no_grad():
            tensors = [host.to(self.device, non_blocking=True) for host in hosts]
            return Sent(tensors, self._stream.record_event())

    def receive(self, sent: Sent) -> None:
        """Makes the caller's current stream wait for the copies.

        It waits for their event and not for the side stream, on which later batches are queued.
        The memory is of the side stream: `record_stream` keeps it from being used again before
        the current stream has done with it.
        """
        current = torch.accelerator.current_stream(self.device)
        current.wait_event(sent.event)  # pyright: ignore[reportArgumentType] - a torch.Event here
        for tensor in sent.tensors:
            tensor.record_stream(current)
