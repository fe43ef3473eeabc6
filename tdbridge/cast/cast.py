"""`cast`: some leaves of a tree in another dtype, the rest as they are."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
from tensordict import is_floating, is_tensor_collection
from torch import Tensor

from tdbridge.cast.consolidated import cast_consolidated, cast_into
from tdbridge.cast.numbers import cast_array
from tdbridge.cast.policy import (
    Keep,
    Policy,
    Targets,
    Where,
    grouped,
    policy_of,
    target,
    targets_in,
    targets_of,
)
from tdbridge.cast.tensors import cast_tensors
from tdbridge.convert.leaves import with_paths
from tdbridge.convert.records import is_record, opened
from tdbridge.layout.dtypes import DType
from tdbridge.layout.spec import Layout, Path
from tdbridge.layout.tree import is_node, leaves_of, rebuild, tree_of
from tdbridge.pytrees.nodes import arraydict_of
from tdbridge.pytrees.packed import PackedArrayDict, over_segments


def cast(
    tree: Any, dtype: Any, *, where: Where = is_floating, keep: Keep = None, out: Any = None
) -> Any:
    """Casts leaves of a tree to another dtype, with the same bits in torch and in JAX.

    Labels, ids and masks keep their dtype by default, and a complex leaf is never made a real one.
    Gradients pass through, in torch and in JAX; under `jax.jit` it is traced. `where` and `keep`
    see paths, dtypes and shapes, never values, and are asked once for each structure.

    Args:
        tree: a TensorDict, a tensorclass, an ArrayDict, a packed one, or a pytree with leaves of
            any kind.
        dtype: a floating-point or complex dtype of torch, numpy or JAX, or its name.
        where: which leaves: a predicate such as `tensordict.is_floating` or `is_inexact`, called
            with a tensor of the leaf's dtype. While it is `is_floating`, leaves of a tensorclass
            that has a `cast_filter` of its own follow that one, as in stock.
        keep: what stays as it is: a glob of the path with its keys joined by `/`, or several of
            them; what lies under a node that matches is kept too. Or a predicate that is called
            with the path, a tuple of strings. Or a mapping of globs to the dtypes that those
            leaves are cast to instead, None for "as it is"; the first that matches counts.
        out: a consolidated TensorDict with the layout of the result, such as an earlier result of
            a consolidated tree, to be filled again in place. `tree` is a TensorDict then, and
            gradients are not carried.

    Returns:
        `out` if it was given, else a tree of the same structure. Leaves that are not cast are the
        same objects, memory shared; a cast leaf has memory of its own. Tied leaves stay tied. A
        packed tree stays packed: each segment is cast as a whole and keeps the places of its
        leaves; if `keep` or `where` divides a segment, it is unpacked and packed anew. Of a tree
        that `consolidate` made the result is consolidated and locked too, all its leaves copied,
        unless a leaf requires a gradient.

    Raises:
        LeafTypeError: `dtype` is none to cast to, or a node is of a kind that is not carried.
        LayoutError: `out` has another layout, or lies in no buffer of its own.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> td = TensorDict(w=torch.ones(2), norm=TensorDict(w=torch.ones(2)), ids=torch.arange(2))
        >>> half = cast(td, torch.bfloat16, keep="norm")
        >>> half["w"].dtype, half["norm", "w"].dtype, half["ids"].dtype
        (torch.bfloat16, torch.float32, torch.int64)
    """
    return cast_by(tree, policy_of(dtype, where, keep), out)


def cast_by(tree: Any, policy: Policy, out: Any = None) -> Any:
    """As `cast`, by a policy that `policy_of` made."""
    if out is not None:
        return cast_into(out, tree, policy)
    if is_node(tree):
        return _cast_node(tree, policy, ())
    treedef = jax.tree.structure(tree, is_leaf=is_node)
    found = with_paths(tree, is_node)
    if any(is_record(type(value)) for _, value in found):
        tree = opened(tree)
        treedef, found = jax.tree.structure(tree, is_leaf=is_node), with_paths(tree, is_node)
    loose = [(path, value) for path, value in found if not is_node(value)]
    targets = grouped([target(policy, p, getattr(v, "dtype", None)) for p, v in loose])
    new = iter(cast_leaves([value for _, value in loose], targets))
    values = [_cast_node(v, policy, p) if is_node(v) else next(new) for p, v in found]
    return jax.tree.unflatten(treedef, values)


def _cast_node(tree: Any, policy: Policy, path: Path) -> Any:
    if isinstance(tree, PackedArrayDict):
        return cast_packed(tree, policy, path)
    whole = cast_consolidated(tree, policy, path)
    if whole is not None:
        return whole
    node = tree_of(tree, path)
    leaves = cast_leaves(leaves_of(node), targets_of(node, policy, path))
    build = rebuild if is_tensor_collection(tree) or isinstance(tree, Tensor) else arraydict_of
    new = build(node, iter(leaves))
    return new.lock_() if getattr(tree, "is_locked", False) else new


def cast_packed(tree: PackedArrayDict, policy: Policy, path: Path) -> PackedArrayDict:
    """By segment; what divides a segment needs another one, and with it another layout."""
    dtypes = tuple([segment.dtype for segment in tree.segments])
    targets = _segment_targets(tree._layout, dtypes, policy, path)
    if targets is None:
        return _cast_node(tree.unpack(), policy, path).pack()
    return over_segments(tree._layout, cast_leaves(tree.segments, targets))


@lru_cache(maxsize=256)
def _segment_targets(
    layout: Layout, dtypes: Sequence[Any], policy: Policy, path: Path
) -> Targets | None:
    """What each segment is cast to; None when the leaves of one are cast to several dtypes."""
    found: dict[str, set[DType | None]] = {}
    targets = targets_in(layout, policy, path, dtypes).each
    for leaf, wanted in zip(layout.leaves, targets, strict=True):
        found.setdefault(leaf.dtype, set()).add(wanted)
    divided = any(len(wanted) > 1 for wanted in found.values())
    return None if divided else grouped([wanted for (wanted,) in found.values()])


def cast_leaves(leaves: Sequence[Any], targets: Targets) -> list[Any]:
    """Each leaf in the dtype of its target; the same object where there is none.

    Leaves that are one object and have one target stay one.
    """
    new = list(leaves)
    for dtype, at in targets.groups:
        chosen = [leaves[i] for i in at]
        for i, value in zip(at, _cast_all(chosen, dtype), strict=True):
            new[i] = value
    return new


def _cast_all(leaves: Sequence[Any], dtype: DType) -> Sequence[Any]:
    ids = [*map(id, leaves)]
    own = dict(zip(ids, leaves, strict=True))
    new = _cast_unequal([*own.values()], dtype)
    if len(new) == len(leaves):
        return new
    found = dict(zip(own, new, strict=True))
    return [found[key] for key in ids]


def _cast_unequal(leaves: Sequence[Any], dtype: DType) -> list[Any]:
    """Leaves of which no two are one object."""
    if all(issubclass(kind, Tensor) for kind in {*map(type, leaves)}):
        return cast_tensors(leaves, dtype)
    return [
        cast_tensors([leaf], dtype)[0] if isinstance(leaf, Tensor) else cast_array(leaf, dtype)
        for leaf in leaves
    ]
