"""TensorDicts that look at a small part of their memory, as a slice does."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_non_tensor, is_tensorclass
from torch import Tensor

from tdbridge._compat.tensordict import tensordict_of
from tdbridge.layout.dtensors import has_dtensors, local_leaf

_MUCH = 4096  # bytes that are worth a copy


def plain_leaves(td: Any) -> list[Tensor] | None:
    """The leaves of a tree that loses nothing when it is consolidated.

    None where there are others than plain tensors on the CPU without a gradient: parameters,
    subclasses, jagged and unbatched tensors; or trees of other kinds: parameters, stored ones.
    """
    if getattr(tensordict_of(td), "_made_from", None) is not None:  # what JAX made of a tree
        return None
    leaves: list[Any] = list(_leaves(td))
    if {*map(type, leaves)} <= {Tensor} and all(map(_is_plain, leaves)):
        return leaves
    return None


def _leaves(td: Any) -> Iterator[Any]:
    """The tensors in a tree, and whatever else it holds that is no non-tensor data."""
    if type(td) is LazyStackedTensorDict:
        for member in td.tensordicts:
            yield from _leaves(member)
    elif isinstance(td, TensorDict) or is_tensorclass(type(td)):
        for value in tensordict_of(td).values():
            if type(value) is Tensor:
                yield value
            elif not is_non_tensor(value):
                yield from _leaves(value)
    else:
        yield td


def shards_share_memory(td: Any) -> bool:
    """Whether there are DTensors whose shards lie in one buffer, as those of `consolidate` do.

    pickle cannot have them: torch raises at the second one.
    """
    leaves: list[Any] = list(_leaves(td))
    if not has_dtensors(leaves):
        return False
    shards = [local_leaf(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    dense = [shard for shard in shards if shard.layout is torch.strided and shard.numel()]
    starts = [shard.untyped_storage().data_ptr() for shard in dense]
    return len({*starts}) < len(starts)


def _is_plain(leaf: Tensor) -> bool:
    dense = leaf.is_cpu and leaf.layout is torch.strided and not leaf.is_nested
    return dense and not leaf.requires_grad


def looks_at_little(leaves: list[Tensor], whole: Tensor | None = None) -> bool:
    """Whether a pickle of the leaves, one by one, would carry more than twice their bytes.

    A pickle of a tensor has the whole of its storage. Leaves that overlap are no case of it:
    with memory of their own they would be tied no more.

    Args:
        leaves: plain tensors.
        whole: the buffer that the pickle has in the place of each leaf's storage, if it has one.
    """
    needed = sum(leaf.nbytes for leaf in leaves)
    carried = sum(leaf.untyped_storage().nbytes() for leaf in leaves if whole is None)
    carried += 0 if whole is None else whole.nbytes
    return carried > max(2 * needed, needed + _MUCH) and not _overlap(leaves)


def _overlap(leaves: list[Tensor]) -> bool:
    ranges = sorted([(start := leaf.data_ptr(), start + _span(leaf)) for leaf in leaves])
    return any(stop > start for (_, stop), (start, _) in pairwise(ranges))


def _span(leaf: Tensor) -> int:
    """The bytes from the first element to the end of the last one."""
    if leaf.numel() == 0:
        return 0
    steps = zip(leaf.shape, leaf.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * leaf.itemsize
