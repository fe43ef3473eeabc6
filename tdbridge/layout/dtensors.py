"""DTensors as leaves: what lies in memory is the shard of this rank."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tdbridge.layout.spec import row_major
from tdbridge.layout.tree import Node


def has_dtensors(leaves: Sequence[Any]) -> bool:
    """Whether a DTensor is among the leaves."""
    return any(issubclass(kind, DTensor) for kind in {*map(type, leaves)})


def local_shard(dtensor: DTensor) -> Tensor:
    """This rank's part, detached, its memory shared; waits until it has arrived."""
    with torch.no_grad():  # in a third of the time
        shard: Any = dtensor.to_local()
    # An AsyncCollectiveTensor, which has no public name, after `redistribute(async_op=True)`.
    return (shard.wait() if hasattr(shard, "wait") else shard).detach()


def local_leaf(leaf: Any) -> Any:
    """The shard of a DTensor, and any other leaf as it is."""
    return local_shard(leaf) if isinstance(leaf, DTensor) else leaf


def over_shard(leaf: Any, shard: Tensor) -> Any:
    """A DTensor as `leaf` is one, over another shard; the shard itself if `leaf` is none.

    The mesh, the placements and the global shape are kept. The strides are those of a contiguous
    tensor of that shape.

    Args:
        leaf: a leaf of a tree.
        shard: a contiguous tensor of the shape of its local shard.
    """
    if not isinstance(leaf, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        leaf.device_mesh,
        leaf.placements,
        run_check=False,
        shape=leaf.shape,
        stride=row_major(tuple(leaf.shape)),
    )


def local_node(node: Node) -> Node:
    """A described tree over the shards of this rank.

    It has no batch size at any level: that of the tree is one of the global shapes.
    """
    return replace(
        node,
        batch_size=(),
        names=None,
        leaves=list(map(local_leaf, node.leaves)),
        nested=tuple([(key, local_node(child)) for key, child in node.nested]),
    )
