"""Consolidating a tree whose structure was seen before, and crossing over."""

from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
import torch
from tensordict import TensorDict

import tdbridge
from benchmarks.case import Case, Contenders, Goal

COUNTS = (10, 1_000)


def cases(quick: bool) -> Iterable[Case]:
    """Return the cases; they are small, so ``quick`` leaves none of them out."""
    at_most_stock, at_most_plain = Goal(1, "tensordict"), Goal(1, "from_dlpack")
    for count in COUNTS:
        goal = at_most_stock if count == max(COUNTS) else None
        yield Case(f"consolidate-{count}", partial(_consolidate, partial(_flat, count)), goal)
    yield Case("consolidate-mixed", partial(_consolidate, _mixed))
    for count in COUNTS:
        yield Case(f"to_jax-{count}", partial(_to_jax, count), at_most_plain)
    for count in COUNTS:
        yield Case(f"to_torch-{count}", partial(_to_torch, count))


def _consolidate(make: Callable[[], TensorDict]) -> Contenders:
    td = make()
    leaves = [_as_bytes(leaf) for leaf in jax.tree.leaves(td)]
    buffer = torch.cat(leaves)
    return Contenders(
        ours=lambda: tdbridge.consolidate(td),
        peers={"tensordict": lambda: td.consolidate(metadata=True)},
        floor=lambda: torch.cat(leaves, out=buffer),
    )


def _to_jax(count: int) -> Contenders:
    td = _flat(count)
    tensors = td.to_dict()
    whole = torch.cat([_as_bytes(leaf) for leaf in tensors.values()])
    return Contenders(
        ours=lambda: tdbridge.to_jax(td),
        peers={"from_dlpack": lambda: jax.tree.map(jax.dlpack.from_dlpack, tensors)},
        floor=lambda: jax.dlpack.from_dlpack(whole),
        ready=jax.block_until_ready,
    )


def _to_torch(count: int) -> Contenders:
    ad = tdbridge.to_jax(_flat(count))
    arrays = dict(ad)
    whole = jnp.concatenate(list(arrays.values()))
    return Contenders(
        ours=lambda: tdbridge.to_torch(ad),
        peers={"from_dlpack": lambda: jax.tree.map(torch.from_dlpack, arrays)},
        floor=lambda: torch.from_dlpack(whole),
    )


def _flat(count: int) -> TensorDict:
    return TensorDict({f"x{i}": torch.rand(16) for i in range(count)}, batch_size=[])


def _mixed() -> TensorDict:
    """Return a tree of 64 leaves of odd sizes, so that most of them need padding."""
    groups = {f"g{i}": {f"h{j}": _mixed_leaves(1 + i + j) for j in range(4)} for i in range(4)}
    return TensorDict(groups, batch_size=[])


def _mixed_leaves(size: int) -> dict[str, torch.Tensor]:
    return {
        "f32": torch.rand(size, 7),
        "bf16": torch.rand(size, 5).to(torch.bfloat16),
        "i64": torch.randint(1_000, (size, 3)),
        "u8": torch.randint(256, (size, 13), dtype=torch.uint8),
    }


def _as_bytes(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.view(torch.uint8).view(-1)
