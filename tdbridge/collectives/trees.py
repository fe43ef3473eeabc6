"""Any tree -> the buffer that messages are cut from, and back to what the user gave."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection
from torch import Tensor

from tdbridge._compat.torch import copy_all
from tdbridge.collectives.groups import Members
from tdbridge.collectives.sharded import check_shards, shards_text
from tdbridge.convert import to_jax, to_torch
from tdbridge.convert.leaves import Parts, take_apart
from tdbridge.errors import CollectiveError, LeafTypeError
from tdbridge.layout.buffer import consolidate, declare, placement_for, views_of
from tdbridge.layout.dtensors import has_dtensors, local_leaf
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.placement import Placement
from tdbridge.layout.plan import plan_of
from tdbridge.layout.sharded import shards_placement
from tdbridge.layout.spec import Layout, Path, path_str
from tdbridge.layout.tree import Node, leaves_of, paths_of, rebuild, tree_of
from tdbridge.pytrees.arraydict import ArrayDict
from tdbridge.pytrees.nodes import arraydict_of
from tdbridge.pytrees.packed import PackedArrayDict
from tdbridge.pytrees.segments import slots_of

Give = Callable[[Any], Any]


class Carried(NamedTuple):
    """A tree as one buffer.

    Attributes:
        whole: the consolidated TensorDict over the buffer.
        placement: its buffer and layout.
        update: given a consolidated TensorDict with this layout, writes its values to the tree that
            was carried, where that can be written to, and returns a tree of its kind.
        like: the same without writing: a new tree of that kind.
        shards: which shards of DTensors this rank holds; empty if the tree has none.
    """

    whole: Any
    placement: Placement
    update: Give
    like: Give
    shards: str = ""

    def named(self, call: str) -> str:
        """The call with what all members have to agree on besides."""
        return f"{call.rstrip(')')}, shards={self.shards!r})" if self.shards else call

    @property
    def layout(self) -> Layout:
        """Of the buffer, non-tensor values included."""
        return self.placement.whole

    @property
    def storage(self) -> Tensor:
        """The buffer: uint8."""
        return self.placement.storage


def carried(tree: Any, members: Members | None = None, *, written: bool = False) -> Carried:
    """A TensorDict, an ArrayDict, or a pytree of tensors and arrays as one buffer.

    A consolidated TensorDict is its own buffer; everything else is copied into a new one. Of
    DTensors it has the local shards.

    Args:
        tree: what is carried.
        members: the group, if the call is one that shards may take part in.
        written: whether its tensors are going to be written to.

    Raises:
        LeafTypeError: a leaf is no dense tensor or array, or cannot be written to.
        CollectiveError: a leaf is no tensor or array at all, or a DTensor of which the members hold
            different shards.
    """
    if is_tensor_collection(tree):
        placement = placement_for(tree)
        if placement is not None and placement.holds:
            return Carried(tree, placement, _keep(tree), _same)
        node = tree_of(tree)
        if has_dtensors(leaves_of(node)):
            return _sharded(tree, node, members, written)
        whole = consolidate(tree)  # which has more to say of a leaf that it does not take
        if written:
            _check_writable(paths_of(node), leaves_of(node))
        return _packed(whole, partial(_written, leaves_of(node), tree), _same)
    if isinstance(tree, (ArrayDict, PackedArrayDict)):
        whole = consolidate(to_torch(tree))
        back = partial(as_jax, packed=isinstance(tree, PackedArrayDict))
        return _packed(whole, back, back)
    parts = take_apart(tree)
    check_shards(parts.paths, parts.leaves, members)
    whole = consolidate(_nested(parts))
    if written:
        _check_writable(parts.paths(), parts.leaves)
    only_tensors = bool(parts.leaves) and all(isinstance(leaf, Tensor) for leaf in parts.leaves)
    update = partial(_put_back, parts, written=tree if only_tensors else None)
    found = _packed(whole, update, partial(_put_back, parts, write=False))
    return found._replace(shards=shards_text(parts.leaves))


def _sharded(tree: Any, node: Node, members: Members | None, written: bool) -> Carried:
    """A TensorDict with DTensors: its shards, in their own buffer if they are in one."""
    leaves = leaves_of(node)
    check_shards(lambda: paths_of(node), leaves, members)
    shards = shards_text(leaves)
    if (held := shards_placement(tree)) is not None:
        return Carried(tree, held, lambda _: tree, _same, shards)
    own = list(map(local_leaf, leaves))
    if written:
        _check_writable(paths_of(node), own)
    whole = consolidate(TensorDict(_under(paths_of(node), own), []))
    return _packed(whole, partial(_written, own, tree), _same)._replace(shards=shards)


def _check_writable(paths: Sequence[Path], leaves: Sequence[Any]) -> None:
    """Checks that no element of a tensor lies where another one does, as of an expanded one."""
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, Tensor) and not _is_writable(local_leaf(leaf)):
            raise LeafTypeError(
                f"{path_str(path)}: got an expanded tensor, which cannot be written to: call "
                "contiguous() first."
            )


def _is_writable(leaf: Tensor) -> bool:
    sizes = zip(leaf.stride(), leaf.shape, strict=True)
    return not leaf.numel() or all(step or size == 1 for step, size in sizes)


def _packed(whole: Any, update: Give, like: Give) -> Carried:
    placement = placement_for(whole)
    assert placement is not None  # noqa: S101 - it was consolidated just now
    return Carried(whole, placement, update, like)


def _same(whole: Any) -> Any:
    return whole


def _keep(tree: Any) -> Give:
    def update(whole: Any) -> Any:
        if whole is not tree:
            consolidate(whole, out=tree)
        return tree

    return update


def _written(leaves: Sequence[Tensor], tree: Any, whole: Any) -> Any:
    """Writes to the tensors of a TensorDict that is not consolidated."""
    copy_all(leaves, leaves_of(tree_of(whole)))
    return tree


def as_jax(whole: Any, packed: bool = False) -> Any:
    """As jax arrays of the same dtypes: those of 64 bits came from arrays of 64 bits."""
    leaves = [whole] if isinstance(whole, Tensor) else leaves_of(tree_of(whole))
    wide = any(leaf.itemsize > 4 for leaf in leaves)
    with jax.enable_x64(True) if wide else nullcontext():
        return to_jax(whole, packed=packed)


# --- pytrees


_ALIKE = "two keys of the tree are written alike."


def _nested(parts: Parts) -> TensorDict:
    """The leaves of a pytree under their paths."""
    paths, leaves = parts.paths(), []
    for path, leaf in zip(paths, parts.leaves, strict=True):
        if not isinstance(leaf, (Tensor, jax.Array, np.ndarray, np.generic)):
            raise CollectiveError(
                f"{path_str(path)}: got a {type(leaf).__name__}, which is no tensor or array."
            )
        array = np.asarray(leaf) if isinstance(leaf, np.generic) else local_leaf(leaf)
        leaves.append(array)
    return TensorDict(to_torch(_under(paths, leaves)), [])


def _under(paths: Sequence[Path], leaves: Sequence[Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        node = nested
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise CollectiveError(f"{path_str(path)}: {_ALIKE}")
        last = path[-1] if path else "value"
        if last in node:
            raise CollectiveError(f"{path_str(path)}: {_ALIKE}")
        node[last] = leaf
    return nested


def _put_back(parts: Parts, whole: Any, *, write: bool = True, written: Any = None) -> Any:
    """The pytree over the values of `whole`: tensors written to, arrays new.

    Args:
        parts: the pytree.
        whole: the values.
        write: whether tensors are written to, or new ones are made.
        written: the pytree itself, if it has nothing but tensors, which are written to.
    """
    new = []
    for path, leaf in zip(parts.paths(), parts.leaves, strict=True):
        value = whole[path or "value"]
        if isinstance(leaf, Tensor):
            if write:
                copy_all([local_leaf(leaf)], [value])
            new.append(leaf if write else value)
        elif isinstance(leaf, jax.Array):
            new.append(as_jax(value))
        else:
            new.append(_to_numpy(value))
    return parts.put_together(new, _rebuilt) if written is None else written


def _to_numpy(tensor: Tensor) -> np.ndarray:
    """By bytes: torch has no numpy arrays of bfloat16 and float8."""
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw.view(dtype_of(tensor.dtype).in_numpy).reshape(tensor.shape)


def _rebuilt(node: Node, leaves: Any) -> Any:
    build = rebuild if is_tensor_collection(node.source) else arraydict_of
    return build(node, leaves)


# --- trees that came from elsewhere


def tree_over(layout: Layout, storage: Tensor) -> Any:
    """The consolidated TensorDict that a layout describes, over a buffer that is there."""
    node = tree_of(slots_of(layout))
    views = views_of(layout, storage)
    places = {leaf.path: i for i, leaf in enumerate(layout.leaves)}
    new = rebuild(node, iter([views[places[path]] for path in paths_of(node)]))
    whole = tree_of(new)
    return declare(new, whole, plan_of(whole), storage, views)


def whole_like(carried: Carried, storage: Tensor) -> Any:
    """A consolidated TensorDict as that of `carried`, over another buffer of its layout."""
    node, plan = tree_of(carried.whole), carried.placement.plan
    views = views_of(plan.layout, storage)
    new = rebuild(node, iter([views[i] for i in plan.order]), storage.device)
    return declare(new, node, plan, storage, views)


def new_buffer(layout: Layout | None, members: Members) -> Tensor:
    """A buffer for what a member is sent without having a tree, where the group can write."""
    assert layout is not None  # noqa: S101 - `agree` gives one
    return torch.empty(layout.nbytes, dtype=torch.uint8, device=members.device)


def arrived(layout: Layout | None, storage: Tensor, to: str) -> Any:
    """The tree that came, as a consolidated TensorDict or as an ArrayDict over the same memory."""
    assert layout is not None  # noqa: S101
    whole = tree_over(layout, storage)
    return whole if to == "torch" else as_jax(whole)
