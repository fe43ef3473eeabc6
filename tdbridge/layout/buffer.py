"""Layout + tree -> buffer, and buffer + Layout -> views."""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from tdbridge._compat import tensordict as compat
from tdbridge._compat.torch import copy_all, why_not_dense
from tdbridge.errors import LayoutError, LeafTypeError
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.plan import plan_of
from tdbridge.layout.spec import ALIGNMENT, Layout, Path, path_str
from tdbridge.layout.stock import file_suffix, stock_metadata
from tdbridge.layout.tree import Node, rebuild, tree_of, walk_leaves


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
    zero. Stock tensordict pickles, sends, moves and loads it as its own. float8 leaves, and nested
    tensordicts with one of stock's own key names (`"size"`, `"leaves"`, ...), are laid out too,
    but stock's compact pickle cannot describe them, so that it pickles them leaf by leaf.

    `td` is neither changed nor locked, and shares no memory with the result. A tree that lies in
    such a buffer already is returned as it is, as stock does. Gradients are not carried: the
    leaves are detached, and conjugate and negative bits resolved.

    Args:
        td: a TensorDict or a tensorclass of dense tensors.
        filename: a file to hold the buffer, in the format that `TensorDict.from_consolidated`
            reads. It is written beside and renamed; the result maps it, so in-place writes to the
            result reach the file. An existing file is replaced; those who map it keep the old one.
        device: where the buffer lives; the device of the leaves by default.
        out: a result of this function with the same layout, to be filled again in place.

    Returns:
        A locked tree of the class of `td`, with its keys (in their order), batch sizes, names,
        devices, non-tensor entries and nested classes. `out` itself when it was given.

    Raises:
        LeafTypeError: a leaf is not a dense tensor (sparse, nested, DTensor, a jax array, ...).
        LayoutError: the leaves lie on several devices and `device` is not given; `out` has
            another layout; or a non-tensor entry cannot be written to the file.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> td = TensorDict(x=torch.ones(3), y=torch.arange(5), batch_size=[])
        >>> c = consolidate(td)
        >>> c.is_consolidated(), [t.data_ptr() % 64 for t in c.values()]
        (True, [0, 0])
    """
    tree = tree_of(td)
    layout, order = plan_of(tree)
    leaves = _checked_leaves(tree)
    if out is not None:
        return _refill(out, layout, order, leaves)
    target = torch.device(device) if device is not None else _device_of(tree, leaves)
    if filename is None and _lies_in_buffer(td, layout, order, leaves, target):
        return td
    suffix = b"" if filename is None else file_suffix(tree, layout)
    storage, commit = _allocate(layout, target, filename, suffix)
    views = views_of(layout, storage)
    copy_all(ordered := [views[i] for i in order], leaves)
    commit()
    return _declare(tree, ordered, storage, layout)


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
    leaves = []
    for path, leaf in walk_leaves(tree):
        if not isinstance(leaf, Tensor):
            raise LeafTypeError(
                f"{path_str(path)}: got a {type(leaf).__module__}.{type(leaf).__name__}, not a "
                "torch tensor. Call tdbridge.to_torch(td) first."
            )
        if (reason := why_not_dense(leaf)) is not None:
            raise LeafTypeError(f"{path_str(path)}: got {reason}.")
        leaves.append(leaf.detach())
    return leaves


def _device_of(tree: Node, leaves: Sequence[Tensor]) -> torch.device:
    devices = {leaf.device for leaf in leaves}
    if len(devices) > 1:
        where: dict[str, Path] = {str(leaf.device): path for path, leaf in walk_leaves(tree)}
        listed = ", ".join(f"{path_str(path)} on {name}" for name, path in sorted(where.items()))
        raise LayoutError(f"the leaves lie on several devices ({listed}): pass `device=`.")
    declared = getattr(tree.source, "device", None)
    return next(iter(devices), declared or torch.device("cpu"))


def _allocate(
    layout: Layout, device: torch.device, filename: Any, suffix: bytes
) -> tuple[Tensor, Any]:
    """The buffer with its padding zeroed, and what to call when the leaves are in it."""
    if filename is None:
        # torch's CPU and CUDA allocators align to 64 bytes or more.
        storage, commit = torch.empty(layout.nbytes, dtype=torch.uint8, device=device), _nothing
    else:
        storage, commit = _allocate_file(layout, device, FilePath(filename), suffix)
    gaps = _gaps(layout)
    if len(gaps):
        storage.index_fill_(0, gaps.to(storage.device), 0)
    return storage, commit


def _nothing() -> None:
    pass


def _allocate_file(
    layout: Layout, device: torch.device, filename: FilePath, suffix: bytes
) -> tuple[Tensor, Any]:
    if device.type != "cpu":
        raise LayoutError(f"got device={str(device)!r} with filename: a file is mapped by the CPU.")
    beside = filename.with_name(f".{filename.name}.{os.getpid()}.tmp")
    with beside.open("wb") as file:
        file.truncate(layout.nbytes)
        file.seek(layout.nbytes)
        file.write(suffix)
    size = layout.nbytes + len(suffix)
    mapped = torch.from_file(str(beside), shared=True, size=size, dtype=torch.uint8)

    def commit() -> None:
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(filename)

    return mapped[: layout.nbytes], commit


@lru_cache(maxsize=256)
def _gaps(layout: Layout) -> Tensor:
    """The indices of the padding bytes."""
    ends = [*(leaf.offset for leaf in layout.leaves), layout.nbytes][1:]
    ranges = [range(leaf.stop, end) for leaf, end in zip(layout.leaves, ends, strict=True)]
    return torch.tensor([i for gap in ranges for i in gap], dtype=torch.int64)


def _lies_in_buffer(
    td: Any, layout: Layout, order: Sequence[int], leaves: Sequence[Tensor], device: torch.device
) -> bool:
    """Whether `td` is consolidated already and just as `layout` says."""
    storage = compat.consolidated_storage(td)
    if storage is None or storage.device != device or storage.storage_offset() != 0:
        return False
    base = storage.data_ptr()
    return (
        (device.type != "cpu" or base % ALIGNMENT == 0)
        and storage.numel() >= layout.nbytes
        and all(
            leaf.is_contiguous() and leaf.data_ptr() == base + layout.leaves[i].offset
            for i, leaf in zip(order, leaves, strict=True)
            if leaf.numel()
        )
    )


def _refill(out: Any, layout: Layout, order: Sequence[int], leaves: Sequence[Tensor]) -> Any:
    target = tree_of(out)
    out_layout, out_order = plan_of(target)
    if out_layout != layout:
        raise LayoutError(f"`out` has another layout: {first_difference(out_layout, layout)}.")
    slots: list[Any] = [None] * len(leaves)
    for i, (_, leaf) in zip(out_order, walk_leaves(target), strict=True):
        slots[i] = leaf
    copy_all([slots[i] for i in order], leaves)
    return out


def first_difference(got: Layout, expected: Layout) -> str:
    """One line on where two layouts differ first."""
    for name in ("nodes", "leaves"):
        left, right = ({x.path: x for x in getattr(side, name)} for side in (got, expected))
        for path in sorted(left.keys() | right.keys()):
            if left.get(path) != right.get(path):
                return f"at {path_str(path)}: got {left.get(path)}, expected {right.get(path)}"
    return "none"


def _declare(tree: Node, views: Sequence[Tensor], storage: Tensor, layout: Layout) -> Any:
    result = rebuild(tree, iter(views), storage.device)
    compat.set_consolidated(result, storage, stock_metadata(tree, layout, storage.device))
    return result.lock_()
