"""One data loader for both frameworks: prefetched batches, resumable, over the same memory."""

from tdbridge.loaders.collate import collate as collate
from tdbridge.loaders.grain import GrainSource as GrainSource
from tdbridge.loaders.loader import Loader as Loader
from tdbridge.loaders.rows import Rows as Rows
from tdbridge.loaders.workers import forbid_jax as forbid_jax

__all__ = ["GrainSource", "Loader", "Rows", "collate", "forbid_jax"]
