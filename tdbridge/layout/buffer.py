"""Layout + tree -> buffer, and buffer + Layout -> views."""

import os
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from tensordict import TensorDict, TensorDictParams
from torch import Tensor

from tdbridge._compat import tensordict as compat
from tdbridge._compat.torch import have_memory, why_not_dense
from tdbridge.errors import LayoutError, LeafTypeError
from tdbridge.layout.allocate import allocate
from tdbridge.layout.fill import fill, fill_if_plain, place_of, runs_of
from tdbridge.layout.placement import Placement, addresses_in, placement_of, remember, segments_of
from tdbridge.layout.plan import Plan, constants_of, plan_of, skeleton_of, with_constants
from tdbridge.layout.spec import (
    ALIGNMENT,
    Layout,
    Path,
    first_difference,
    path_str,
)
from tdbridge.layout.stock import file_suffix, stock_metadata
from tdbridge.layout.tree import BUILDERS, Node, leaves_of, paths_of, rebuild, tree_of, walk_nodes


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
    zero. Stock tensordict pickles, sends, moves and loads it as its own. So it does with float8
    leaves and with nested tensordicts that have one of stock's own key names (`"size"`, `"cls"`,
    ...), which stock alone cannot describe: the process that reads them has to import tdbridge.

    `td` is neither changed nor locked, and shares no memory with the result. A tree that is the
    whole of such a buffer already is returned itself, as stock does, locked. Gradients are not
    carried: the leaves are detached, and conjugate and negative bits resolved.

    Args:
        td: a TensorDict or a tensorclass of dense tensors.
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
        LeafTypeError: a leaf is not a dense tensor (sparse, nested, DTensor, a jax array, ...).
        LayoutError: the leaves lie on several devices and `device` is not given; `out` has
            another layout, lies in no such buffer or comes with another argument; or the file
            cannot hold a non-tensor entry, a dtype, a class or a name.

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
    leaves, plan = planned(tree)
    layout, order = plan.layout, plan.order
    # "cuda" is "cuda:0": an empty tensor tells.
    given = None if device is None else torch.empty(0, device=device).device
    target = given or _device_of(tree, leaves)
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


def views_of(layout: Layout, storage: Tensor) -> list[Tensor]:
    """One tensor per leaf of `layout`, in its order, over the memory of `storage`.

    Equal leaves that stand equally far apart are taken apart by one call, in half the time of a
    view of each (measured). Detached, they are no parts of one whole to autograd, which lets none
    of these be written to with a gradient; they still count writes together.

    Args:
        layout: the layout of the buffer.
        storage: uint8, one-dimensional, at least `layout.nbytes` long, storage offset 0.
    """
    views: list[Tensor] = []
    flats = dict(zip([s.dtype for s in layout.segments], segments_of(layout, storage), strict=True))
    for run in runs_of(layout):
        if run.stop - run.start == 1:
            views.append(torch.as_strided(flats[run.dtype], run.shape, run.stride[1:], run.offset))
        else:
            views += map(Tensor.detach, place_of(run, storage).unbind())
    return views


def check_nodes(tree: Node) -> None:
    """Checks that a tree can be consolidated; parameters are made a TensorDict, as stock does.

    Raises:
        LeafTypeError: a node cannot be described in stock's metadata.
    """
    for path, node in walk_nodes(tree):
        if node.unbatched:
            where = path_str((*path, min(node.unbatched)))
            raise LeafTypeError(
                f"{where}: got an UnbatchedTensor, which a consolidated tensordict cannot hold: "
                "expand it over the batch, or keep it outside."
            )
        if node.cls in BUILDERS and "wrapped" in dict(node.constants):
            where = f"{path_str(path)}: " if path else ""
            raise LeafTypeError(
                f"{where}got a lazy stack of a tensorclass: call `.contiguous()` first."
            )
        if issubclass(node.cls, TensorDictParams):  # as stock does
            node.cls = TensorDict


def planned(tree: Node) -> tuple[list[Tensor], Plan]:
    """The leaves of a tree, and its plan.

    Raises:
        LeafTypeError: a leaf is not a dense tensor.
    """
    leaves = leaves_of(tree)
    with suppress(LeafTypeError):  # `_check_leaf` has more to say of the leaf
        plan = plan_of(tree)  # which knows no nested and no quantized leaves
        if have_memory(leaves):
            return leaves, plan
    for path, leaf in zip(paths_of(tree), leaves, strict=True):
        _check_leaf(path, leaf)
    return leaves, plan_of(tree)


def _check_leaf(path: Path, leaf: Any) -> None:
    if not isinstance(leaf, Tensor):
        raise LeafTypeError(
            f"{path_str(path)}: got a {type(leaf).__module__}.{type(leaf).__name__}, not a torch "
            "tensor. Call tdbridge.to_torch(td) first."
        )
    if (reason := why_not_dense(leaf)) is not None:
        raise LeafTypeError(f"{path_str(path)}: got {reason}.")


_CPU = torch.device("cpu")
_device, _is_cpu = attrgetter("device"), attrgetter("is_cpu")


def _device_of(tree: Node, leaves: Sequence[Tensor]) -> torch.device:
    if leaves and all(map(_is_cpu, leaves)):
        return _CPU
    devices = {*map(_device, leaves)}
    if len(devices) > 1:
        pairs = zip(paths_of(tree), leaves, strict=True)
        where: dict[str, Path] = {str(leaf.device): path for path, leaf in pairs}
        listed = ", ".join(f"{path_str(path)} on {name}" for name, path in sorted(where.items()))
        raise LayoutError(f"the leaves lie on several devices ({listed}): pass `device=`.")
    declared = getattr(tree.source, "device", None)
    return next(iter(devices), declared or _CPU)


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


def outside(storage: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The leaves, those in the buffer copied: one would be overwritten before it is read."""
    inside = range(start := storage.data_ptr(), start + storage.numel())
    return [leaf.clone() if leaf.data_ptr() in inside else leaf for leaf in leaves]


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
