"""all_gather of batches of different lengths."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import is_tensor_collection

from tdbridge.collectives.agreement import Check, numbers_of, taking_part
from tdbridge.collectives.groups import Members
from tdbridge.collectives.handle import Handle
from tdbridge.collectives.sharded import refuse_dtensors
from tdbridge.collectives.trees import as_jax
from tdbridge.convert import to_torch
from tdbridge.errors import CollectiveError
from tdbridge.pytrees.arraydict import ArrayDict


def all_gather(
    gather: Callable[..., Handle], tree: Any, members: Members, stacked: bool, check: Check
) -> Handle:
    """See `tdbridge.collectives.all_gather` with `pad=True`; `gather` takes equal lengths."""
    call = "all_gather(pad=True)"
    with taking_part(members, call, "always"):
        tensors = _with_batch(tree)
    own = tensors.batch_size[0]
    lengths = numbers_of(members, call, own)
    padded = tensors
    if own < max(lengths):
        rows = [max(lengths) - own, *tensors.batch_size[1:]]
        zeros = tensors.apply(
            lambda leaf: leaf.new_zeros(rows[0], *leaf.shape[1:]), batch_size=rows
        )
        padded = torch.cat([tensors, zeros], dim=0)
    handle = gather(padded, members, stacked, check)
    back = (lambda td: td) if is_tensor_collection(tree) else as_jax

    def finish(found: Any) -> Any:
        if stacked:
            return back(found)
        return [back(one[:n]) for one, n in zip(found, lengths, strict=True)]

    return handle.then(finish)


def _with_batch(tree: Any) -> Any:
    if not (is_tensor_collection(tree) or isinstance(tree, ArrayDict)) or not tree.batch_size:
        raise CollectiveError(
            f"got a {type(tree).__name__} without a batch size: pass a TensorDict or an ArrayDict "
            "with one."
        )
    refuse_dtensors(tree)
    return to_torch(tree)
