"""Layout + tree -> buffer, and buffer + Layout -> views."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdbridge._compat import tensordict as compat
from tdbridge.errors import LayoutError
from tdbridge.layout.allocate import allocate
from tdbridge.layout.checks import check_nodes, device_of_leaves, planned
from tdbridge.layout.dtensors import has_dtensors
from tdbridge.layout.fill import fill, fill_if_plain, outside, views_of
from tdbridge.layout.placement import Placement, addresses_in, placement_of, remember
from tdbridge.layout.plan import Plan, constants_of, plan_of, skeleton_of, with_constants
from tdbridge.layout.sharded import consolidate_shards, refill_shards, shards_placement
from tdbridge.layout.spec import ALIGNMENT, Layout, Path, first_difference
from tdbridge.layout.stock import file_suffix, stock_metadata
from tdbridge.layout.tree import Node, leaves_of, rebuild, tree_of


def consolidate(
    td: Any,
    *,
    filename: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    out: Any = None,
) -> Any:
    """Copies all leaves of `td` into one aligned buffer, one segment per dtype.

    The result is what stock `td.consolidate(metadata=True)` gives, laid out so that JAX can share
    it: every leaf starts on a multiple of 64 bytes, leaves of a dtype lie together, padding is
    zero. Stock tensordict sends, moves, saves and loads it as its own; pickle has a format of ours
    from protocol 5 on (docs/sending.md). So it does with float8 leaves and with nested tensordicts
    that have one of stock's own key names (`"size"`, `"cls"`, ...), which stock alone cannot
    describe: the process that reads them has to import tdbridge.

    `td` is neither changed nor locked, and shares no memory with the result. A tree that is the
    whole of such a buffer already is returned itself, as stock does, locked. Gradients are not
    carried: the leaves are detached, and conjugate and negative bits resolved.

    Of a DTensor its local shard lies in the buffer, contiguous, and the leaf of the result is a
    DTensor over it, with the same mesh, placements (`Partial` included) and global shape. Nothing
    is communicated. Batch sizes are global, the layout is that of the shards. Stock has no words
    for such a tree, so `is_consolidated()` is false of it, and a pickle has its DTensors one by
    one. This function, `to_jax` and `tdbridge.collectives` know it all the same.

    Args:
        td: a TensorDict or a tensorclass of dense tensors and DTensors of such.
        filename: a file to hold the buffer, in the format that `TensorDict.from_consolidated`
            reads. It is written beside and renamed; the result maps it, so in-place writes to the
            result reach the file. An existing file is replaced; those who map it keep the old one.
        device: where the buffer lives; the device of the leaves by default.
        out: a result of this function with the same layout, to be filled again in place; its
            buffer is kept, so that it goes with neither `filename` nor `device`. `td` may hold
            leaves of `out`, in other places too.

    Returns:
        A locked tree of the class of `td`, with its keys (in their order), batch sizes, names,
        devices, non-tensor entries and nested classes; parameters are a TensorDict. `out` itself
        when it was given.

    Raises:
        LeafTypeError: a leaf is not a dense tensor (sparse, nested, a jax array, ...).
        LayoutError: the leaves lie on several devices and `device` is not given; `out` has
            another layout or sharding, lies in no such buffer or comes with another argument; the
            file cannot hold a non-tensor entry, a dtype, a class or a name; or there are DTensors,
            and `filename` or another device is given.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> td = TensorDict(x=torch.ones(3), y=torch.arange(5), batch_size=[])
        >>> c = consolidate(td)
        >>> c.is_consolidated(), [t.data_ptr() % 64 for t in c.values()]
        (True, [0, 0])
    """
    tree = tree_of(td)
    check_nodes(tree)
    if out is not None:
        if filename is not None or device is not None:
            raise LayoutError("got `out` with `filename` or `device`: the buffer of `out` is kept.")
        return _refill(out, tree)
    # "cuda" is "cuda:0": an empty tensor tells.
    given = None if device is None else torch.empty(0, device=device).device
    if has_dtensors(leaves_of(tree)):
        if filename is not None:
            raise LayoutError(
                "got DTensors with filename: a file has the shards of one rank and no words for "
                "the others. Use tdbridge.checkpoint.save."
            )
        return consolidate_shards(td, tree, given)
    leaves, plan = planned(tree)
    layout, order = plan.layout, plan.order
    target = given or device_of_leaves(tree, leaves)
    if filename is None:
        storage = buffer_under(td, layout, order, leaves)
        if storage is not None and storage.device == target:
            # Written anew: stock lets a new batch size of a nested tensordict pass it by.
            return declare(td, tree, plan, storage, plan.placed(leaves))
    suffix = b"" if filename is None else file_suffix(tree, layout)
    with allocate(layout, target, filename, suffix) as storage:
        views = views_of(layout, storage)
        fill(layout, storage, views, plan.placed(leaves))
    new = rebuild(tree, iter([views[i] for i in order]), storage.device)
    return declare(new, tree, plan, storage, views)


def declare(td: Any, tree: Node, plan: Plan, storage: Tensor, leaves: Sequence[Tensor]) -> Any:
    """Locks a tree whose leaves, in the order of the layout, lie in a buffer; it is consolidated.

    `tree` describes it, or the one that it was made from.
    """
    compat.set_consolidated(td, storage, stock_metadata(tree, plan.layout))
    td = td.lock_()
    remember(td, tree, Placement(plan, constants_of(tree), storage, leaves))
    return td


def buffer_under(
    td: Any, layout: Layout, order: Sequence[int], leaves: Sequence[Tensor]
) -> Tensor | None:
    """The whole buffer that `td` lies in just as `layout` says, or None.

    A part of a consolidated tree has the buffer of the whole, of another size.
    """
    storage = compat.consolidated_storage(td)
    if storage is None or storage.storage_offset() != 0 or storage.numel() != layout.nbytes:
        return None
    base = storage.data_ptr()
    if storage.device.type == "cpu" and base % ALIGNMENT:
        return None
    places = addresses_in(layout, base)
    in_place = list(map(Tensor.data_ptr, leaves)) == [places[i] for i in order]
    return storage if in_place and all(map(Tensor.is_contiguous, leaves)) else None


def _refill(out: Any, tree: Node) -> Any:
    placement = _held(out)
    if placement is None or not _refilled_at_once(placement, tree):
        if has_dtensors(leaves_of(tree)) or shards_placement(out) is not None:
            return refill_shards(out, tree)
        leaves, plan = planned(tree)  # raises for what is wrong with the tree itself
        placement = placement_to_fill(out, plan, constants_of(tree))
        own = outside(placement.storage, plan.placed(leaves))
        fill(plan.layout, placement.storage, placement.leaves, own)
    return out


def _held(out: Any) -> Placement | None:
    placement = placement_of(out)
    return placement if placement is not None and placement.holds else _found_placement(out)


def placement_to_fill(out: Any, plan: Plan, constants: tuple[tuple[Path, Any], ...]) -> Placement:
    """Where the leaves of `out` are, which a tree of this plan is going to be written to.

    Args:
        out: what the user gave.
        plan: the plan of the tree.
        constants: its non-tensor values, as `constants_of` gives them.

    Raises:
        LayoutError: `out` lies in no buffer of ours, or has another layout.
    """
    placement = _held(out)
    if placement is None:
        raise LayoutError(
            f"`out`, a {type(out).__name__}, is no result of tdbridge.consolidate, or was unlocked "
            "or given other tensors since: make a new one."
        )
    if placement.layout != plan.layout or placement.constants != constants:
        differ = first_difference(placement.whole, with_constants(plan.layout, constants))
        raise LayoutError(f"`out` has another layout: {differ}.")
    return placement


def _refilled_at_once(placement: Placement, tree: Node) -> bool:
    """Fills the buffer if the tree is plainly that of the placement, judged without a plan."""
    plan = placement.plan
    if plan.skeleton != skeleton_of(tree) or placement.constants != constants_of(tree):
        return False
    leaves = plan.placed(leaves_of(tree))
    return fill_if_plain(plan.layout, placement.storage, leaves)


def placement_for(td: Any) -> Placement | None:
    """Where the leaves of `td` are, or None when it is not the whole of a buffer of ours."""
    return placement_of(td) or _found_placement(td)


def _found_placement(td: Any) -> Placement | None:
    """The same of a tree that was consolidated elsewhere: unpickled, or read from a file."""
    if compat.consolidated_slot(td) is None:
        return None
    tree = tree_of(td)
    plan, leaves = plan_of(tree), leaves_of(tree)
    storage = buffer_under(td, plan.layout, plan.order, leaves)
    if storage is None:
        return None
    return Placement(plan, constants_of(tree), storage, plan.placed(leaves))
