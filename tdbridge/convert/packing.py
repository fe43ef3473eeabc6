"""TensorDict -> PackedArrayDict: the segments of its buffer cross over, not its leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch.distributed.tensor import DTensor

from tdbridge.convert.leaves import is_unpacked, with_paths
from tdbridge.convert.records import opened
from tdbridge.convert.sharing import refuse_copies
from tdbridge.errors import LeafTypeError, TdbridgeError
from tdbridge.layout.buffer import consolidate, placement_for
from tdbridge.layout.placement import Placement
from tdbridge.layout.spec import Path, path_str
from tdbridge.layout.tree import leaves_of, paths_of, tree_of
from tdbridge.pytrees.arraydict import ArrayDict
from tdbridge.pytrees.packed import packed

Convert = Callable[[Sequence[torch.Tensor], Callable[[], Sequence[Path]]], Sequence[jax.Array]]


def pack_tree(
    tree: Any, copy: bool | None, convert: Convert, on_leaves: Callable[[Any], Any]
) -> Any:
    """Every TensorDict of `tree` as a PackedArrayDict, and its other leaves as `to_jax` has them.

    Args:
        tree: a TensorDict, or any pytree with some in it.
        copy: as of `to_jax`.
        convert: gives arrays over the memory of flat tensors; raises for those that would have to
            be narrowed with a loss.
        on_leaves: what becomes of a tree, or of the rest of it, that is not packed.
    """

    def pack(node: Any) -> Any:
        if not is_unpacked(node):
            return node
        if isinstance(node, ArrayDict):
            return on_leaves(node).pack()
        placement = _placement(node)
        arrays = convert(
            placement.segments, lambda: [(s.dtype,) for s in placement.layout.segments]
        )
        return packed(placement.whole, arrays)

    whole = is_unpacked(tree)
    try:
        found = tree if whole else opened(tree)
        if copy is False:
            _refuse_copies(found)
        new = jax.tree.map(pack, found, is_leaf=is_unpacked)
    except TdbridgeError:
        on_leaves(tree)  # if that raises too, its error names each leaf
        raise
    return new if whole else on_leaves(new)


def _refuse_copies(tree: Any) -> None:
    pairs = with_paths(tree, is_unpacked)
    reasons = [_why_copied(node) if is_unpacked(node) else None for _, node in pairs]
    refuse_copies(lambda: [path for path, _ in pairs], reasons, "Or use copy=None.")


def _why_copied(tree: Any) -> str | None:
    if isinstance(tree, ArrayDict):
        return "packing an ArrayDict copies it: pass it packed"
    if placement_for(tree) is None:
        return "it is not consolidated: pack tdbridge.consolidate(td)"
    return None


def _placement(td: Any) -> Placement:
    placement = placement_for(td)
    if placement is None:
        _refuse_dtensors(td)
        return _placement(consolidate(td))
    return placement


def _refuse_dtensors(td: Any) -> None:
    node = tree_of(td)
    for path, leaf in zip(paths_of(node), leaves_of(node), strict=True):
        if isinstance(leaf, DTensor):
            raise LeafTypeError(
                f"{path_str(path)}: got a DTensor, and a packed tree has arrays of one device: use "
                "packed=False, or pack the local shards."
            )
