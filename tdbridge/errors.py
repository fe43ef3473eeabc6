"""Every error that tdbridge raises on purpose.

Each one is also the builtin error that one would guess, so `except TypeError` keeps working
and `except TdbridgeError` catches them all.
"""


class TdbridgeError(Exception):
    """The base of every error that tdbridge raises on purpose."""


class LeafTypeError(TdbridgeError, TypeError):
    """A leaf or a node of a kind that cannot be carried."""


class NarrowingError(TdbridgeError, ValueError):
    """A 64-bit leaf would lose values in a 32-bit array."""


class CopyError(TdbridgeError, ValueError):
    """`copy=False` was asked for and at least one leaf would be copied."""


class AliasingError(TdbridgeError, RuntimeError):
    """Memory shared with JAX was written or moved, or nobody recorded whether it was."""


class LayoutError(TdbridgeError, ValueError):
    """Two layouts differ, or a layout does not describe what it is used on."""


class DistributedError(TdbridgeError, RuntimeError):
    """The processes of a job cannot do together what was asked for."""


class CollectiveError(DistributedError, ValueError):
    """A collective that cannot be done with these trees, in this group, or did not end."""


class LoaderError(TdbridgeError, RuntimeError):
    """A source of batches that cannot be gone through, or not from that state."""


class WorkerError(TdbridgeError, RuntimeError):
    """Something that a worker process of a loader cannot do."""


class FrozenError(TdbridgeError, TypeError):
    """An attempt to change an immutable tree."""


class CheckpointError(TdbridgeError, RuntimeError):
    """A checkpoint that cannot be written or read."""


class UnsafeCheckpointError(CheckpointError):
    """A checkpoint asks for something that loading must not do."""
