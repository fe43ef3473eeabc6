"""One tree of tensors for PyTorch and JAX: the same memory, pytrees and checkpoints.

td = TensorDict(...)                 # torch
ad = tdbridge.to_jax(td)             # JAX: an ArrayDict over the same memory
td = tdbridge.to_torch(ad)           # and back
"""

from importlib.metadata import version

from tdbridge import checkpoint as checkpoint
from tdbridge import collectives as collectives
from tdbridge import distributed as distributed
from tdbridge import loaders as loaders
from tdbridge import sending as sending
from tdbridge.cast import Precision as Precision
from tdbridge.cast import cast as cast
from tdbridge.convert import LeafReport as LeafReport
from tdbridge.convert import Report as Report
from tdbridge.convert import debug_aliasing as debug_aliasing
from tdbridge.convert import explain as explain
from tdbridge.convert import to_jax as to_jax
from tdbridge.convert import to_torch as to_torch
from tdbridge.convert import written_since as written_since
from tdbridge.errors import AliasingError as AliasingError
from tdbridge.errors import CheckpointError as CheckpointError
from tdbridge.errors import CollectiveError as CollectiveError
from tdbridge.errors import CopyError as CopyError
from tdbridge.errors import DistributedError as DistributedError
from tdbridge.errors import FrozenError as FrozenError
from tdbridge.errors import LayoutError as LayoutError
from tdbridge.errors import LeafTypeError as LeafTypeError
from tdbridge.errors import LoaderError as LoaderError
from tdbridge.errors import NarrowingError as NarrowingError
from tdbridge.errors import TdbridgeError as TdbridgeError
from tdbridge.errors import UnsafeCheckpointError as UnsafeCheckpointError
from tdbridge.errors import WorkerError as WorkerError
from tdbridge.layout import Layout as Layout
from tdbridge.layout import LeafSpec as LeafSpec
from tdbridge.layout import NodeSpec as NodeSpec
from tdbridge.layout import Segment as Segment
from tdbridge.layout import consolidate as consolidate
from tdbridge.layout import layout_of as layout_of
from tdbridge.pytrees import ArrayDict as ArrayDict
from tdbridge.pytrees import PackedArrayDict as PackedArrayDict
from tdbridge.pytrees import PRNGKey as PRNGKey
from tdbridge.pytrees import register as register

__version__ = version("tdbridge")

__all__ = [
    "AliasingError",
    "ArrayDict",
    "CheckpointError",
    "CollectiveError",
    "CopyError",
    "DistributedError",
    "FrozenError",
    "Layout",
    "LayoutError",
    "LeafReport",
    "LeafSpec",
    "LeafTypeError",
    "LoaderError",
    "NarrowingError",
    "NodeSpec",
    "PRNGKey",
    "PackedArrayDict",
    "Precision",
    "Report",
    "Segment",
    "TdbridgeError",
    "UnsafeCheckpointError",
    "WorkerError",
    "cast",
    "checkpoint",
    "collectives",
    "consolidate",
    "debug_aliasing",
    "distributed",
    "explain",
    "layout_of",
    "loaders",
    "register",
    "sending",
    "to_jax",
    "to_torch",
    "written_since",
]
