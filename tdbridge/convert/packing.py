"""TensorDict -> PackedArrayDict: the segments of its buffer cross over, not its leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from tdbridge.convert.leaves import is_unpacked
from tdbridge.errors import CopyError, TdbridgeError
from tdbridge.layout.buffer import consolidate, placement_for
from tdbridge.layout.placement import Placement
from tdbridge.layout.spec import Path
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
            return _pack_arrays(node, copy, on_leaves)
        placement = _placement(node, copy)
        arrays = convert(
            placement.segments, lambda: [(s.dtype,) for s in placement.layout.segments]
        )
        return packed(placement.whole, arrays)

    if is_unpacked(tree):
        return _with_paths(pack, tree, on_leaves)
    new = _with_paths(lambda t: jax.tree.map(pack, t, is_leaf=is_unpacked), tree, on_leaves)
    return on_leaves(new)


def _with_paths(pack: Callable[[Any], Any], tree: Any, on_leaves: Callable[[Any], Any]) -> Any:
    """`pack(tree)`; where that raises and `on_leaves` does, its error, which names each leaf."""
    try:
        return pack(tree)
    except TdbridgeError:
        on_leaves(tree)
        raise


def _pack_arrays(tree: ArrayDict, copy: bool | None, on_leaves: Callable[[Any], Any]) -> Any:
    if copy is False:
        raise CopyError("copy=False, but packing an ArrayDict copies it: pass it packed.")
    return on_leaves(tree).pack()


def _placement(td: Any, copy: bool | None) -> Placement:
    placement = placement_for(td)
    if placement is not None:
        return placement
    if copy is False:
        raise CopyError(
            "copy=False, but the tree is not consolidated: pack tdbridge.consolidate(td)."
        )
    return _placement(consolidate(td), False)
