"""Trees of float32 leaves to bfloat16: plain, consolidated, refilled, and packed."""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
import torch
from tensordict import TensorDict, is_floating

import tdbridge
from benchmarks.case import Case, Contenders, Goal

MANY = (1_000, 16)
SIZES = ((10, 16), MANY, (100, 250_000))


def cases(quick: bool) -> Iterable[Case]:
    """Return the cases; the one of 100 MB is left out if ``quick``."""
    for size in SIZES[:2] if quick else SIZES:
        name, many = "{}x{}".format(*size), size == MANY
        third, tenth = (1 / 3, 0.1) if many else (1, 1)
        yield Case(f"plain-{name}", partial(_plain, size), Goal(1, "tensordict"))
        whole = partial(_consolidated, size)
        yield Case(f"consolidated-{name}", partial(whole, refill=False), Goal(third, "tensordict"))
        yield Case(f"out-{name}", partial(whole, refill=True), Goal(tenth, "tensordict"))
        yield Case(f"jax-{name}", partial(_jax, size), Goal(1, "astype"))
        packed = Goal(0.01 if many else 1, "astype")
        yield Case(f"packed-{name}", partial(_packed, size), packed)


def _tree(size: tuple[int, int]) -> TensorDict:
    count, length = size
    return TensorDict({f"x{i}": torch.rand(length) for i in range(count)}, batch_size=[])


def _stock(td: TensorDict) -> TensorDict:
    return td.to(torch.bfloat16, cast_filter=is_floating)


def _plain(size: tuple[int, int]) -> Contenders:
    td = _tree(size)
    return Contenders(
        ours=lambda: tdbridge.cast(td, torch.bfloat16), peers={"tensordict": lambda: _stock(td)}
    )


def _consolidated(size: tuple[int, int], *, refill: bool) -> Contenders:
    whole = tdbridge.consolidate(_tree(size))
    out = tdbridge.cast(whole, torch.bfloat16) if refill else None
    return Contenders(
        ours=lambda: tdbridge.cast(whole, torch.bfloat16, out=out),
        peers={"tensordict": lambda: _stock(whole)},
    )


def _jax(size: tuple[int, int]) -> Contenders:
    tree = tdbridge.to_jax(_tree(size))
    return Contenders(
        ours=lambda: tdbridge.cast(tree, jnp.bfloat16),
        peers={"astype": lambda: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)},
        ready=jax.block_until_ready,
    )


def _packed(size: tuple[int, int]) -> Contenders:
    tree = tdbridge.to_jax(_tree(size))
    packed = tree.pack()
    return Contenders(
        ours=lambda: tdbridge.cast(packed, jnp.bfloat16),
        peers={"astype": lambda: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)},
        ready=jax.block_until_ready,
    )
