"""The trees of all members as one tree with a dimension more, and such a tree taken apart."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor

from tdbridge.collectives.differences import differences
from tdbridge.collectives.sharded import refuse_dtensors
from tdbridge.collectives.trees import Carried, carried, whole_like
from tdbridge.errors import CollectiveError
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.fill import runs_of
from tdbridge.layout.spec import Layout, Path, path_str
from tdbridge.layout.tree import BUILDERS, Node, is_node, leaves_of, rebuild, tree_of
from tdbridge.pytrees.arraydict import ArrayDict
from tdbridge.pytrees.packed import PackedArrayDict


def rows_for(tree: Carried, count: int) -> Tensor:
    """A buffer for each of `count` members, one after the other: uint8, `[count, bytes]`."""
    return torch.empty(count, len(tree.storage), dtype=torch.uint8, device=tree.storage.device)


def given_back(tree: Carried, buffers: Sequence[Tensor] | Tensor, stacked: bool) -> Any:
    """The trees of all members as the user gets them: one tree with a dimension more, or a list."""
    if isinstance(buffers, Tensor) and stacked:
        return tree.like(_stacked(tree, buffers))
    return [tree.like(whole_like(tree, buffer)) for buffer in buffers]


def _stacked(tree: Carried, rows: Tensor) -> Any:
    """A TensorDict whose leaves are views of `rows`: `[members, *shape]`, a member apart."""
    node, placement = tree_of(tree.whole), tree.placement
    views: list[Tensor] = []
    for run in runs_of(placement.layout):
        flat = rows.view(-1).view(dtype_of(run.dtype).in_torch)
        apart, (step, *inner) = placement.layout.nbytes // flat.element_size(), run.stride
        shape = (run.stop - run.start, len(rows), *run.shape)
        all_of_run = torch.as_strided(flat, shape, (step, apart, *inner), run.offset)
        views += map(Tensor.detach, all_of_run.unbind())
    return rebuild(_with_rows(node, len(rows), ()), iter([views[i] for i in placement.plan.order]))


def rows_under(out: Any, tree: Carried, count: int) -> Tensor:
    """The rows of what `given_back` gave earlier for trees of this layout.

    Raises:
        CollectiveError: `out` is something else.
    """
    leaves = leaves_of(tree_of(out)) if is_tensor_collection(out) else []
    sizes, dtypes, offsets = _as_rows(tree.placement.layout, tree.placement.plan.order, count)
    if [leaf.shape for leaf in leaves] == sizes and [leaf.dtype for leaf in leaves] == dtypes:
        filled = next((leaf for leaf in leaves if leaf.numel()), None)
        if filled is None:
            return rows_for(tree, count)  # of no bytes
        storage, size = filled.untyped_storage(), len(tree.storage)
        start = storage.data_ptr()
        # What starts inside of this memory is in this storage.
        places = [0 if offset is None else start + offset for offset in offsets]
        if storage.nbytes() == count * size and list(map(Tensor.data_ptr, leaves)) == places:
            raw = torch.empty(0, dtype=torch.uint8, device=filled.device)
            return raw.set_(storage, 0, (count, size), (size, 1))
    raise CollectiveError(
        "got out= that is not what all_gather gave for a tree of this layout and this group: pass "
        "what an earlier call gave, or None."
    )


@lru_cache(maxsize=64)
def _as_rows(layout: Layout, order: tuple[int, ...], count: int) -> tuple[list[Any], ...]:
    """The shape, the dtype and the offset of each leaf of such a stack; None if it is empty."""
    specs = [layout.leaves[i] for i in order]
    return (
        [torch.Size((count, *spec.shape)) for spec in specs],
        [dtype_of(spec.dtype).in_torch for spec in specs],
        [spec.offset if spec.numel else None for spec in specs],
    )


def check_stacks(tree: Any) -> None:
    """Checks that trees like this one can be stacked; a pytree of others always can.

    Raises:
        CollectiveError: a part of it cannot.
    """
    if is_node(tree):
        _with_rows(tree_of(tree), 1, ())


def _with_rows(node: Node, count: int, path: Path) -> Node:
    if node.cls in BUILDERS or node.unbatched:
        raise CollectiveError(
            f"{path_str(path)}: got a {node.cls.__name__} or unbatched leaves, which have no such "
            "stack: pass stacked=False."
        )
    nested = tuple([(key, _with_rows(child, count, (*path, key))) for key, child in node.nested])
    names = None if node.names is None else (None, *node.names)
    return replace(node, batch_size=(count, *node.batch_size), names=names, nested=nested)


def parts_of(trees: Any, count: int, name: str) -> list[Any]:
    """One tree for each member, of a sequence of them or of one tree with a dimension more.

    Raises:
        CollectiveError: there are more or fewer.
    """
    if is_tensor_collection(trees) or isinstance(trees, (ArrayDict, PackedArrayDict)):
        trees = trees.unpack() if isinstance(trees, PackedArrayDict) else trees
        refuse_dtensors(trees)
        size = trees.batch_size[0] if trees.batch_size else None
        if size != count:
            raise CollectiveError(
                f"{name}: got a tree of batch size {list(trees.batch_size)}, expected one that "
                f"starts with {count}, a slice for each member of the group, or a list of trees."
            )
        return [trees[i] for i in range(count)]
    if not isinstance(trees, (list, tuple)) or len(trees) != count:
        got = f"{len(trees)} trees" if isinstance(trees, (list, tuple)) else type(trees).__name__
        raise CollectiveError(f"{name}: got {got}, expected {count}, one for each member.")
    return list(trees)


def all_carried(trees: Sequence[Any], name: str) -> list[Carried]:
    """All of them as buffers of one layout.

    Raises:
        CollectiveError: they have several.
    """
    every = [carried(tree) for tree in trees]
    for i, other in enumerate(every):
        same_leaves(other, every[0], f"{name}: tree {i}")
    return every


def same_leaves(tree: Carried, first: Carried, what: str) -> None:
    """Checks that a tree has the leaves of the first of a list.

    Raises:
        CollectiveError: it has others. It lists them.
    """
    if tree.placement.layout.leaves != first.placement.layout.leaves:
        differ = differences({"there": tree.layout, "in tree 0": first.layout})
        raise CollectiveError(f"{what} has other leaves than tree 0 of the list. {differ}.")
