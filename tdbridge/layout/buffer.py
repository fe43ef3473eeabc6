"""Layout + tree -> buffer, and buffer + Layout -> views."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tdbridge._compat import tensordict as compat
from tdbridge._compat.torch import all_plain, copy_all, why_not_dense
from tdbridge.errors import LayoutError, LeafTypeError
from tdbridge.layout.allocate import allocate
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.plan import Plan, constants_of, full_layout, plan_of
from tdbridge.layout.spec import ALIGNMENT, Layout, LeafSpec, Path, path_str
from tdbridge.layout.stock import file_suffix, stock_metadata
from tdbridge.layout.tree import Node, leaves_of, paths_of, rebuild, tree_of


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
            buffer is kept, so that it goes with neither `filename` nor `device`.

    Returns:
        A locked tree of the class of `td`, with its keys (in their order), batch sizes, names,
        devices, non-tensor entries and nested classes. `out` itself when it was given.

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
    leaves = _checked_leaves(tree)
    layout, order = plan = plan_of(tree)
    if out is not None:
        if filename is not None or device is not None:
            raise LayoutError("got `out` with `filename` or `device`: the buffer of `out` is kept.")
        return _refill(out, tree, plan, leaves)
    # "cuda" is "cuda:0": an empty tensor tells.
    given = None if device is None else torch.empty(0, device=device).device
    target = given or _device_of(tree, leaves)
    if filename is None:
        storage = buffer_under(td, layout, order, leaves)
        if storage is not None and storage.device == target:
            # Written anew: stock lets a new batch size of a nested tensordict pass it by.
            return _declare(td, tree, layout, storage)
    suffix = b"" if filename is None else file_suffix(tree, layout)
    with allocate(layout, target, filename, suffix) as storage:
        views = views_of(layout, storage)
        copy_all(ordered := [views[i] for i in order], leaves)
    return _declare(rebuild(tree, iter(ordered), storage.device), tree, layout, storage)


def _declare(td: Any, tree: Node, layout: Layout, storage: Tensor) -> Any:
    compat.set_consolidated(td, storage, stock_metadata(tree, layout))
    return td.lock_()


def views_of(layout: Layout, storage: Tensor) -> list[Tensor]:
    """One tensor per leaf of `layout`, in its order, all views of `storage`.

    Args:
        layout: the layout of the buffer.
        storage: uint8, one-dimensional, at least `layout.nbytes` long, storage offset 0.
    """
    flats = {s.dtype: segment_of(storage, s.dtype, s.offset, s.stop) for s in layout.segments}
    return [
        torch.as_strided(flats[dtype], shape, stride, offset)
        for dtype, shape, stride, offset in _strides(layout)
    ]


def segment_of(storage: Tensor, dtype: str, offset: int, stop: int) -> Tensor:
    """Bytes `offset` to `stop` of `storage` as ONE flat tensor of `dtype`; memory is shared."""
    return storage[offset:stop].view(dtype_of(dtype).in_torch)


@lru_cache(maxsize=1024)
def _strides(layout: Layout) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...]:
    rows = []
    for leaf in layout.leaves:
        stride, step = [], 1
        for size in reversed(leaf.shape):
            stride.append(step)
            step *= max(size, 1)
        offset = leaf.offset // dtype_of(leaf.dtype).itemsize
        rows.append((leaf.dtype, leaf.shape, tuple(reversed(stride)), offset))
    return tuple(rows)


def _checked_leaves(tree: Node) -> list[Tensor]:
    leaves = leaves_of(tree)
    if not all_plain(leaves):
        for path, leaf in zip(paths_of(tree), leaves, strict=True):
            _check_leaf(path, leaf)
    return leaves


def _check_leaf(path: Path, leaf: Any) -> None:
    if not isinstance(leaf, Tensor):
        raise LeafTypeError(
            f"{path_str(path)}: got a {type(leaf).__module__}.{type(leaf).__name__}, not a torch "
            "tensor. Call tdbridge.to_torch(td) first."
        )
    if (reason := why_not_dense(leaf)) is not None:
        raise LeafTypeError(f"{path_str(path)}: got {reason}.")


def _device_of(tree: Node, leaves: Sequence[Tensor]) -> torch.device:
    devices = {leaf.device for leaf in leaves}
    if len(devices) > 1:
        pairs = zip(paths_of(tree), leaves, strict=True)
        where: dict[str, Path] = {str(leaf.device): path for path, leaf in pairs}
        listed = ", ".join(f"{path_str(path)} on {name}" for name, path in sorted(where.items()))
        raise LayoutError(f"the leaves lie on several devices ({listed}): pass `device=`.")
    declared = getattr(tree.source, "device", None)
    return next(iter(devices), declared or torch.device("cpu"))


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
    places = [base + offset if size else 0 for offset, size in _extents(layout)]
    # An empty tensor has no address, which torch calls 0.
    in_place = list(map(Tensor.data_ptr, leaves)) == [places[i] for i in order]
    return storage if in_place and all(map(Tensor.is_contiguous, leaves)) else None


@lru_cache(maxsize=1024)
def _extents(layout: Layout) -> tuple[tuple[int, int], ...]:
    return tuple((leaf.offset, leaf.nbytes) for leaf in layout.leaves)


def _refill(out: Any, tree: Node, plan: Plan, leaves: Sequence[Tensor]) -> Any:
    target = tree_of(out)
    out_layout, out_order = plan_of(target)
    if out_layout != plan.layout or constants_of(target) != constants_of(tree):
        differ = first_difference(full_layout(target), full_layout(tree))
        raise LayoutError(f"`out` has another layout: {differ}.")
    out_leaves = leaves_of(target)
    if buffer_under(out, out_layout, out_order, out_leaves) is None:
        raise LayoutError(f"`out`, a {type(out).__name__}, is no result of tdbridge.consolidate.")
    slots: list[Any] = [None] * len(leaves)
    for i, leaf in zip(out_order, out_leaves, strict=True):
        slots[i] = leaf
    copy_all([slots[i] for i in plan.order], leaves)
    return out


def first_difference(got: Layout, expected: Layout) -> str:
    """One line on where two layouts differ first."""
    for name in ("nodes", "leaves"):
        left, right = ({x.path: x for x in getattr(side, name)} for side in (got, expected))
        for path in sorted(left.keys() | right.keys()):
            one, other = left.get(path), right.get(path)
            if _without_place(one) != _without_place(other):
                return f"at {path_str(path)}: got {one}, expected {other}"
    return "none"


def _without_place(spec: Any) -> Any:
    """The place of a leaf follows from the leaves before it."""
    return replace(spec, offset=0) if isinstance(spec, LeafSpec) else spec
