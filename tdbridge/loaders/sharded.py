"""A batch of each process of a job, as one batch over all of them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from tdbridge.convert.leaves import take_apart
from tdbridge.convert.placement import places_of
from tdbridge.errors import LayoutError
from tdbridge.layout.spec import Path, path_str
from tdbridge.pytrees.nodes import arraydict_of


def spans_processes(sharding: Any) -> bool:
    """Whether a sharding, or one in a tree of them, has devices of other processes."""
    found = jax.tree.leaves(sharding, is_leaf=lambda value: isinstance(value, Sharding))
    return any(isinstance(each, Sharding) and not each.is_fully_addressable for each in found)


def put_on(sharding: Any, in_jax: Callable[[Any], Any], batch: Any) -> Any:
    """The batch whose shards here are those of this process's `batch`.

    Args:
        sharding: as of `to_jax`, over the devices of several processes.
        in_jax: converts a batch, where it is.
        batch: what this process has of it.

    Returns:
        The global batch: the size of a dimension that is sharded over processes is the sum of
        theirs. It has arrived when the call returns.

    Raises:
        LayoutError: a leaf cannot be cut, or stand on all of them, as its sharding says.
    """
    parts = take_apart(in_jax(batch))
    places = places_of(parts, None, sharding)
    leaves = [
        leaf if place is None else _over_processes(leaf, place, path)
        for leaf, place, path in zip(parts.leaves, places, parts.paths(), strict=True)
    ]
    jax.block_until_ready(leaves)  # until then, the memory of the batch is read
    return parts.put_together(leaves, arraydict_of)


def _over_processes(leaf: Any, place: Sharding, path: Path) -> jax.Array:
    try:
        return jax.make_array_from_process_local_data(place, np.asarray(leaf))
    except (ValueError, IndexError) as error:
        raise LayoutError(
            f"{path_str(path)}: a leaf of shape {leaf.shape} here cannot be put on {place} "
            f"({error}): pass a tree of shardings with another one for it."
        ) from error
