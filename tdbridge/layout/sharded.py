"""`consolidate` of trees with DTensors: the shards of this rank in one buffer.

Stock's metadata has no words for a DTensor, and whoever reads a consolidated tree by it takes the
leaves for plain tensors. So such a tree is not declared to stock, and what is known of it is kept
here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from tdbridge._compat.tensordict import tensordict_of
from tdbridge.errors import LayoutError
from tdbridge.layout.allocate import allocate
from tdbridge.layout.checks import device_of_leaves, planned
from tdbridge.layout.dtensors import local_node, over_shard
from tdbridge.layout.fill import fill, outside, views_of
from tdbridge.layout.placement import Placement, addresses_in
from tdbridge.layout.plan import constants_of, full_layout
from tdbridge.layout.spec import first_difference, path_str
from tdbridge.layout.tree import Node, leaves_of, paths_of, rebuild, tree_of

_BUFFERS: Any = WeakIdKeyDictionary()
"""The buffer that the shards of a tree were laid in, as long as the tree lives."""


def consolidate_shards(td: Any, tree: Node, device: torch.device | None) -> Any:
    """See `consolidate`, of which this is the part for trees with DTensors.

    Args:
        td: the tree.
        tree: its description.
        device: where the buffer is asked to live.

    Raises:
        LayoutError: a shard lies on another device.
    """
    if shards_placement(td) is not None:
        return td.lock_()
    local = local_node(tree)
    leaves, plan = planned(local)
    target = device_of_leaves(local, leaves)
    if device not in (None, target):
        raise LayoutError(
            f"got device={str(device)!r} and DTensors whose shards are on {str(target)!r}: a "
            "DTensor stays where its mesh is. Move the shards, `to_local()`, instead."
        )
    with allocate(plan.layout, target) as storage:
        views = views_of(plan.layout, storage)
        fill(plan.layout, storage, views, plan.placed(leaves))
    own = [views[i] for i in plan.order]
    new = rebuild(tree, map(over_shard, leaves_of(tree), own), target).lock_()
    _BUFFERS[tensordict_of(new)] = storage
    return new


def shards_placement(td: Any) -> Placement | None:
    """Where the local shards of a tree are, or None: it is not the whole of such a buffer.

    The layout has the shapes of the shards, and no batch sizes.
    """
    storage = _BUFFERS.get(tensordict_of(td)) if is_tensor_collection(td) else None
    if storage is None or not td.is_locked:
        return None
    local = local_node(tree_of(td))
    leaves, plan = planned(local)
    placed = plan.placed(leaves)
    held = list(map(Tensor.data_ptr, placed)) == addresses_in(plan.layout, storage.data_ptr())
    whole = held and plan.layout.nbytes == len(storage) and all(map(Tensor.is_contiguous, placed))
    return Placement(plan, constants_of(local), storage, placed) if whole else None


def refill_shards(out: Any, tree: Node) -> Any:
    """Copies the shards of a tree to those of `out`, a result of `consolidate`.

    Raises:
        LayoutError: `out` is none of a tree with DTensors, or differs from `tree` in anything that
            would be lost: its layout, a mesh, a placement.
    """
    placement = shards_placement(out)
    if placement is None:
        raise LayoutError(
            f"`out`, a {type(out).__name__}, is no result of tdbridge.consolidate of a tree with "
            "DTensors, or was unlocked or given other tensors since: make a new one."
        )
    there, local = tree_of(out), local_node(tree)
    leaves, plan = planned(local)
    _check_layouts(there, tree)
    _check_shardings(there, tree)
    if plan.layout.leaves != placement.layout.leaves:  # from_local was given another shape
        differ = first_difference(placement.layout, plan.layout)
        raise LayoutError(f"`out` has shards of another layout: {differ}.")
    own = outside(placement.storage, plan.placed(leaves))
    fill(plan.layout, placement.storage, placement.leaves, own)
    return out


def _check_layouts(out: Node, tree: Node) -> None:
    """Of the global shapes, and all that is no leaf."""
    got, expected = full_layout(out), full_layout(tree)
    if got != expected:
        raise LayoutError(f"`out` has another layout: {first_difference(got, expected)}.")


def _check_shardings(out: Node, tree: Node) -> None:
    """Of each leaf, which are in the order of keys of their own tree."""
    held: dict[Any, Any] = dict(zip(paths_of(out), leaves_of(out), strict=True))
    for path, leaf in zip(paths_of(tree), leaves_of(tree), strict=True):
        got, expected = _sharding(held[path]), _sharding(leaf)
        if got != expected:
            raise LayoutError(
                f"`out` has another sharding: at {path_str(path)}: got {_said(got)}, expected "
                f"{_said(expected)}."
            )


def _sharding(leaf: Any) -> tuple[Any, ...] | None:
    return (leaf.device_mesh, leaf.placements) if isinstance(leaf, DTensor) else None


def _said(sharding: Sequence[Any] | None) -> str:
    if sharding is None:
        return "a plain tensor"
    mesh, placements = sharding
    return f"a DTensor of {list(placements)} over {mesh}"
