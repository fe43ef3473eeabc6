"""What is known of the memory of one jax array: where it lay, what it held, who may write to it.

torch counts the in-place writes to a tensor; `detach()` and all views of one base share the
counter, and so do all leaves of a consolidated tree. The bytes tell those apart, and find the
writes that torch does not count.
"""

import zlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdRef

from tdbridge._compat.torch import version_of
from tdbridge.convert.dlpack import numpy_view
from tdbridge.layout.dtensors import local_shard
from tdbridge.layout.spec import Path

WRITTEN = "it was written in place"
OTHER = "its tensor lies in other memory now (set_, .data =)"
MOVED = "its storage was moved (share_memory_, a multiprocessing queue)"


def tensor_over(leaf: torch.Tensor) -> torch.Tensor:
    """A detached tensor over the memory of a tensor, or of a DTensor's local shard."""
    return local_shard(leaf) if isinstance(leaf, DTensor) else leaf.detach()


class _Writer:
    """A leaf that may write to the memory; its views may when it is gone, so aliases are kept."""

    def __init__(self, leaf: torch.Tensor) -> None:
        self.leaf = WeakIdRef(leaf)
        self.memory = tensor_over(leaf)
        self._counter = leaf.detach()
        # Not of the detached one: an inference tensor has no counter, but that has one, always 0.
        self._version = version_of(leaf)

    def moved_from(self, address: int) -> str | None:
        if self.memory.data_ptr() != address:
            return MOVED
        leaf = self.leaf()
        return OTHER if leaf is not None and tensor_over(leaf).data_ptr() != address else None

    def has_written(self) -> bool | None:
        """None: torch does not count its writes."""
        return None if self._version is None else version_of(self._counter) != self._version


@dataclass(slots=True, eq=False)
class Record:
    """The memory of one jax array, as it was when the array was last converted.

    Attributes:
        path: the leaf's path then.
        reported: whether a conversion has raised for it.
    """

    path: Path = ()
    reported: bool = False
    _address: int = 0
    _crc: int | None = None  # None: not on the CPU
    _writers: list[_Writer] = field(default_factory=list)

    def arm(self, path: Path, leaf: torch.Tensor) -> None:
        """Takes the memory of `leaf`, and of the leaves over it so far, as it is now."""
        old = [alive for writer in self._writers if (alive := writer.leaf()) is not None]
        own, *others = map(_Writer, [leaf, *old])
        self.path, self.reported = path, False
        self._address, self._crc = own.memory.data_ptr(), _crc(own.memory)
        self._writers = [own, *(w for w in others if w.memory.data_ptr() == self._address)]

    def fault(self, *, counted: bool) -> str | None:
        """What happened to the memory, or None.

        Args:
            counted: ask torch's counters first, and read no byte when none has moved.
        """
        for writer in self._writers:
            if (reason := writer.moved_from(self._address)) is not None:
                return reason  # nothing may be left to read at the old address
        writes = [writer.has_written() for writer in self._writers]
        if self._crc is None:
            written = any(writes)
        else:
            unwritten = counted and set(writes) == {False}
            written = not unwritten and _crc(self._writers[0].memory) != self._crc
        return WRITTEN if written else None


def _crc(memory: torch.Tensor) -> int | None:
    if memory.device.type != "cpu":
        return None
    values = np.ascontiguousarray(numpy_view(memory))
    return zlib.crc32(values.reshape(-1).view(np.uint8).data)
