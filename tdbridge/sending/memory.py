"""The one buffer of a message: how it leaves this process, and how one that came is used."""

from pickle import PickleBuffer
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tdbridge._compat.torch import import_all, shared_bytes
from tdbridge.errors import LayoutError
from tdbridge.layout.spec import ALIGNMENT


class Whole:
    """A buffer on its way into a pickle.

    From protocol 5 on it is one buffer that goes out of band. Below it is pickled as tensors are,
    so that `torch.save` stores it as a storage.
    """

    def __init__(self, storage: Tensor) -> None:
        self.storage = storage

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if protocol >= 5:
            memory: Any = bytes_of(self.storage)
            return memoryview, (PickleBuffer(memory),)
        return self.storage.__reduce_ex__(protocol)


class _Exported:
    """Keeps a tensor alive under a numpy array.

    `Tensor.numpy()` would pin its memory for good: sent to a queue later, it could not become
    shared memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "shape": (tensor.numel(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def bytes_of(storage: Tensor) -> np.ndarray:
    """The memory of a buffer as a numpy array, which does not pin it."""
    return np.asarray(_Exported(storage)) if storage.numel() else np.empty(0, np.uint8)


def shared(storage: Tensor) -> Tensor:
    """`storage`, or a copy of it, in memory that a queue sends without a copy.

    torch moves a tensor to shared memory as it is sent. Where arrays look at the memory, JAX's
    among them, that would leave them on freed memory: it is copied instead. So is what maps a
    file, which has no descriptor to be sent.
    """
    untyped = storage.untyped_storage()
    if untyped.filename is None and (storage.is_shared() or untyped.resizable()):
        return storage
    return shared_bytes(storage.numel()).copy_(storage)


def received(memory: Any, nbytes: int, *, in_place: bool = False) -> Tensor:
    """The buffer of a message as a tensor: uint8, aligned, of `nbytes`.

    An aligned and writable one is used as it is; any other one is copied once.

    Args:
        memory: what the pickle held: a tensor, or anything with the buffer protocol.
        nbytes: what the layout of the message takes.
        in_place: uses read-only memory too. torch has no read-only tensors: a write to it reaches
            everybody who maps it, or ends the process.

    Raises:
        LayoutError: it is no such buffer, or of another size.
    """
    if isinstance(memory, Tensor):
        storage, writable = _checked(memory), True
    else:
        view = _view_of(memory)
        storage, writable = bytes_over(view), not view.readonly
    if storage.numel() != nbytes:
        raise LayoutError(
            f"got a buffer of {storage.numel()} bytes for a tree of {nbytes}: the message was cut "
            "off, or its parts do not belong together."
        )
    misaligned = storage.device.type == "cpu" and storage.data_ptr() % ALIGNMENT
    return _copied(storage) if misaligned or not (writable or in_place) else storage


def _copied(storage: Tensor) -> Tensor:
    """An aligned copy. By numpy: torch wakes up its threads for it, which takes longer."""
    new = torch.empty(storage.numel(), dtype=torch.uint8, device="cpu")
    bytes_of(new)[:] = bytes_of(storage)
    return new


def _checked(tensor: Tensor) -> Tensor:
    plain = tensor.layout is torch.strided and tensor.dtype == torch.uint8 and tensor.ndim == 1
    if not (plain and tensor.is_contiguous()):
        raise LayoutError(f"got a buffer of {tensor.dtype}, shape {list(tensor.shape)}, not bytes.")
    return tensor


def _view_of(memory: Any) -> memoryview:
    try:
        return memoryview(memory).cast("B")
    except (TypeError, ValueError, BufferError) as error:
        raise LayoutError(f"got a {type(memory).__name__} for a buffer: {error}.") from error


def bytes_over(memory: Any) -> Tensor:
    """A tensor over the memory of what has the buffer protocol, read-only memory included."""
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    array = np.frombuffer(memory, np.uint8)
    if array.flags.writeable:
        return torch.from_numpy(array)
    # `from_numpy` would warn. Version 1.0 carries the read-only flag, which torch does not mind.
    return import_all([array.__dlpack__(max_version=(1, 0))])[0]
