"""`cast` of a consolidated tree: from its buffer to another one, and what makes it a tree again."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor

from tdbridge.cast.moves import move, moves_between
from tdbridge.cast.policy import Policy, targets_in
from tdbridge.cast.tensors import copy_all_cast
from tdbridge.errors import LayoutError
from tdbridge.layout.allocate import allocate
from tdbridge.layout.buffer import (
    check_nodes,
    declare,
    outside,
    placement_for,
    placement_to_fill,
    planned,
    views_of,
)
from tdbridge.layout.placement import Placement
from tdbridge.layout.plan import Plan, constants_of, recast
from tdbridge.layout.spec import Path
from tdbridge.layout.tree import rebuild, tree_of

Ordered = Callable[[Any], Sequence[Tensor]]


def cast_consolidated(td: Any, policy: Policy, path: Path) -> Any:
    """The tree in a buffer of its new layout, declared consolidated and locked; itself if equal.

    None when `td` is no consolidated tree of ours, or one whose gradients are asked for.
    """
    placement = _placement(td)
    if placement is None or _asks_for_gradients(placement):
        return None
    plan, in_order = _plan(placement.plan, policy, path)
    if plan.layout == placement.layout:
        return td
    tree = tree_of(td)
    check_nodes(tree)
    with allocate(plan.layout, placement.storage.device) as storage:
        new = Placement(plan, placement.constants, storage, views_of(plan.layout, storage))
        _move(placement, new, in_order)
    leaves = map(new.leaves.__getitem__, plan.order)
    td = rebuild(tree, leaves, storage.device)
    return declare(td, tree, plan, storage, new.leaves)


def cast_into(out: Any, tree: Any, policy: Policy) -> Any:
    """Fills `out`, which has the layout that the tree has when it is cast."""
    if not is_tensor_collection(tree):
        raise LayoutError(f"got `out` with a {type(tree).__name__}: it is for TensorDicts.")
    placement = _placement(tree)
    if placement is not None:
        plan, in_order = _plan(placement.plan, policy, ())
        there = placement_to_fill(out, plan, placement.constants)
        _move(placement, there, in_order)
        return out
    node = tree_of(tree)
    check_nodes(node)
    leaves, old = planned(node)
    plan, in_order = _plan(old, policy, ())
    there = placement_to_fill(out, plan, constants_of(node))
    own = outside(there.storage, in_order(old.placed(leaves)))
    copy_all_cast(own, there.leaves)
    return out


def _move(old: Placement, new: Placement, in_order: Ordered) -> None:
    moves = moves_between(old.layout, new.layout)
    if moves is None:
        copy_all_cast(in_order(old.leaves), new.leaves)
    else:
        move(moves, old.segments, new.segments)


def _placement(td: Any) -> Placement | None:
    placement = placement_for(td) if is_tensor_collection(td) else None
    return placement if placement is not None and placement.holds else None


def _asks_for_gradients(placement: Placement) -> bool:
    return torch.is_grad_enabled() and any(map(_requires_grad, placement.leaves))


_requires_grad = attrgetter("requires_grad")


@lru_cache(maxsize=256)
def _plan(old: Plan, policy: Policy, path: Path) -> tuple[Plan, Ordered]:
    """The plan of the result, and what brings leaves in the order of its layout."""
    targets = targets_in(old.layout, policy, path).each
    plan = recast(old, [dtype and dtype.name for dtype in targets])
    index = {leaf.path: i for i, leaf in enumerate(old.layout.leaves)}
    places = [index[leaf.path] for leaf in plan.layout.leaves]
    # Of one place, `itemgetter` would give the item and no tuple.
    return plan, itemgetter(*places) if len(places) > 1 else tuple
