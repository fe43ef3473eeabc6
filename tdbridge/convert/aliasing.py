"""Has memory that JAX holds for constant been written, or moved, since it was shared?"""

import gc
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import torch
from jax.core import Tracer
from torch.utils.weak import WeakIdKeyDictionary

from tdbridge.convert.aliasing_record import Record, tensor_over
from tdbridge.convert.leaves import is_unpacked, take_apart
from tdbridge.convert.sharing import Paths, lines
from tdbridge.errors import AliasingError
from tdbridge.layout.spec import Path


class Switch:
    """Whether conversions are recorded. As a context manager, it sets back what was before."""

    on = False  # of the class: one for the process

    def __init__(self, enabled: bool) -> None:
        self._before, self._enabled = Switch.on, enabled
        Switch.on = enabled

    def __enter__(self) -> None:
        """Nothing: it has been switched already."""

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        Switch.on = self._before
        if self._enabled and error is None:
            with _lock:
                _check(counted=False)


# A record stands under its array and under each leaf over the same memory. Its aliases keep nothing
# alive for longer than the longest-lived of those.
_records = WeakIdKeyDictionary()
_lock = threading.RLock()
_KINDS = (torch.Tensor, jax.Array)


def debug_aliasing(enabled: bool = True) -> AbstractContextManager[None]:
    """Makes conversions check that no memory shared with JAX was written meanwhile.

    A switch for the whole process, off at first, and a context manager that sets it back. While it
    is on, `to_jax` and `to_torch` record each leaf whose memory they share, and first check what
    was recorded before, as long as the jax array lives. A leaf is reported by one error; it is
    recorded anew when it is converted again. Nothing is copied, and no memory is kept for longer
    than the tensor or the array lives; but XLA copies a donated array that `to_torch` has
    converted, as it does while a tensor over it lives.

    Conversions ask torch's counters of in-place writes first, and read the bytes only where one
    has moved. The end of a `with` block reads all bytes, and so finds the writes too that torch
    does not count; see docs/conversion.md. A numpy array in the tree is not recorded.

    Args:
        enabled: on or off.

    Returns:
        The context manager; ignore it to leave the switch as it is now.

    Raises:
        AliasingError: by conversions and at the end of a `with` block. It lists the leaves with
            the paths that they had when they were converted.

    Example:
        >>> import torch
        >>> from tdbridge import debug_aliasing, to_jax
        >>> x = torch.ones(3)
        >>> with debug_aliasing():
        ...     array = to_jax({"x": x})["x"]
        ...     x += 1
        Traceback (most recent call last):
        tdbridge.errors.AliasingError: memory shared with JAX has changed:
          ['x']: it was written in place.
        ...
    """
    if not isinstance(enabled, bool):
        raise ValueError(f"enabled is True or False, got {enabled!r}.")
    return Switch(enabled)


def written_since(tree: Any) -> dict[Path, str]:
    """Finds the leaves whose shared memory was written, or moved, since they were converted.

    On the CPU the bytes are compared with those at the (last) conversion, so that every write is
    found that changed one; elsewhere torch's counter of in-place writes decides, for all views of
    one tensor at once. Nothing is copied.

    Args:
        tree: what was given to `to_jax` or `to_torch`, or what came of it, while
            `debug_aliasing` was on. The same leaves in another tree will do; a view or a clone is
            another leaf, and leaves that were not recorded are passed over.

    Returns:
        What happened, by the leaf's path in `tree`; empty when nothing did.

    Raises:
        AliasingError: no leaf of the tree was recorded.

    Example:
        >>> import torch
        >>> from tdbridge import debug_aliasing, to_jax, written_since
        >>> tree = {"x": torch.ones(3), "y": torch.ones(3)}
        >>> with debug_aliasing():
        ...     arrays = to_jax(tree)
        >>> _ = tree["x"].add_(1)
        >>> written_since(arrays)
        {('x',): 'it was written in place'}
    """
    parts = take_apart(tree, is_unpacked)
    with _lock:
        records = [
            _records.get(leaf) if isinstance(leaf, _KINDS) else None for leaf in parts.leaves
        ]
        if not any(records):
            raise AliasingError(
                "no leaf of this tree was recorded. Convert it inside `with tdbridge."
                "debug_aliasing():`, and pass the tree itself, not a view or a clone; of a packed "
                "conversion, the packed tree. Leaves that were copied share no memory; see "
                "tdbridge.explain."
            )
        faults = [record and record.fault(counted=False) for record in records]
    return {path: why for path, why in zip(parts.paths(), faults, strict=True) if why}


def follow(paths: Paths, leaves: Sequence[Any], new: Sequence[Any]) -> None:
    """Checks what was recorded before, and records the leaves that share memory.

    Args:
        paths: gives the path of each leaf.
        leaves: those of the tree that was converted.
        new: what became of each.

    Raises:
        AliasingError: a recorded leaf was written or has moved.
    """
    with _lock:
        _check(counted=True)
        for path, old, leaf in zip(paths(), leaves, new, strict=True):
            if isinstance(leaf, jax.Array):
                _record(path, old, leaf)
            else:
                _record(path, leaf, old)


def _record(path: Path, leaf: Any, array: Any) -> None:
    """Records the pair if it is one, and shares memory."""
    if not isinstance(leaf, torch.Tensor) or not isinstance(array, jax.Array):
        return
    if isinstance(array, Tracer):
        return
    memory = tensor_over(leaf)
    if memory.numel() and memory.data_ptr() in _addresses(array):
        record = _records.get(array) or Record()
        record.arm(path, leaf)
        _records[array] = _records[leaf] = record


def _addresses(array: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def _check(*, counted: bool) -> None:
    """Raises for the arrays that live and have not been reported yet."""
    if not _faulty(counted):
        return
    gc.collect()  # what only a reference cycle holds is not read any more
    if faulty := _faulty(counted):
        for record, _ in faulty:
            record.reported = True
        found = lines([record.path for record, _ in faulty], [fault for _, fault in faulty])
        raise AliasingError(
            f"memory shared with JAX has changed:\n{found}\n"
            f"JAX takes arrays for constant. {_ADVICE}"
        )


def _faulty(counted: bool) -> list[tuple[Record, str]]:
    live = [
        record
        for leaf, record in list(_records.items())
        if isinstance(leaf, jax.Array) and not leaf.is_deleted() and not record.reported
    ]
    return [(record, why) for record in live if (why := record.fault(counted=counted)) is not None]


_ADVICE = (
    "Convert with copy=True, write to a clone(), consolidate each batch into a fresh buffer, or "
    "let go of the array before you write. Call share_memory_() before the conversion: after it, "
    "the array may lie in freed memory, so do not read it."
)
