"""The memory of a buffer: plain, or a file that appears under its name once it is complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from tdbridge._compat.torch import shared_bytes
from tdbridge.errors import LayoutError
from tdbridge.layout.spec import ALIGNMENT, Layout


@contextmanager
def allocate(
    layout: Layout,
    device: torch.device,
    filename: str | os.PathLike[str] | None = None,
    suffix: bytes = b"",
) -> Iterator[Tensor]:
    """The buffer with its padding zeroed: uint8, of `layout.nbytes`, to be filled in the block.

    Args:
        layout: what is going to lie in it.
        device: where the buffer lives.
        filename: a file to hold the buffer. It is written beside, synced and renamed at the end
            of the block; after an error nothing is left of it.
        suffix: what follows the buffer in the file.

    Raises:
        LayoutError: a file is asked for, and the device is not the CPU.
    """
    if filename is None:
        yield _without_gaps(_empty(layout.nbytes, device), layout)
        return
    if device.type != "cpu":
        raise LayoutError(f"got device={str(device)!r} with filename: a file is mapped by the CPU.")
    with _renamed_when_done(Path(filename)) as beside:
        yield _without_gaps(_mapped(beside, layout.nbytes, suffix), layout)


def allocate_shared(layout: Layout) -> Tensor:
    """The same buffer in memory that other processes can map: one goes to a queue without a copy.

    Its padding is zero, as all of fresh shared memory is.
    """
    return shared_bytes(layout.nbytes)


_LARGE = 2**25  # bytes; malloc keeps what is smaller, and gives it again without a page fault


def _empty(nbytes: int, device: torch.device) -> Tensor:
    """Memory that is not written yet, aligned to 64 bytes, as torch's allocators have it.

    Half the time of a large copy goes to the page faults of fresh memory (measured). numpy asks
    for huge pages, where torch does only if its environment says so.
    """
    if device.type != "cpu" or nbytes < _LARGE:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + nbytes])


@contextmanager
def _renamed_when_done(filename: Path) -> Iterator[Path]:
    # Not of `tempfile`, whose files no other user may read.
    beside = filename.with_name(f".{filename.name}.{uuid4().hex}.tmp")
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(filename)
    finally:
        beside.unlink(missing_ok=True)


def _mapped(filename: Path, nbytes: int, suffix: bytes) -> Tensor:
    with filename.open("xb") as file:
        file.truncate(nbytes)
        file.seek(nbytes)
        file.write(suffix)
    size = nbytes + len(suffix)
    mapped = torch.from_file(
        str(filename), shared=True, size=size, dtype=torch.uint8, device=torch.device("cpu")
    )
    return mapped[:nbytes]


def _without_gaps(storage: Tensor, layout: Layout) -> Tensor:
    gaps = _gaps(layout)
    if len(gaps) * _AT_ONCE > layout.nbytes:
        storage.view(torch.int64).zero_()  # as few elements: one thread takes less time for them
    elif len(gaps):
        storage.index_fill_(0, torch.from_numpy(gaps).to(storage.device), 0)
    return storage


_AT_ONCE = 16  # bytes that are zeroed in the time of one by its index (measured)


@lru_cache(maxsize=256)
def _gaps(layout: Layout) -> np.ndarray:
    """The indices of the padding bytes."""
    # Of numpy: a tensor that is kept may be one of a fake mode or of another default device.
    ends = [*(leaf.offset for leaf in layout.leaves), layout.nbytes][1:]
    ranges = [range(leaf.stop, end) for leaf, end in zip(layout.leaves, ends, strict=True)]
    return np.array([i for gap in ranges for i in gap], dtype=np.int64)
