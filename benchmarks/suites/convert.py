"""What a tree of small leaves costs: crossing over, one buffer, flattened and built again.

Leaves are 16 float32, so that what is done per leaf shows and no copying hides it. Results are not
awaited: memory that is shared is there when the call returns. Arrays are new for each call, as
those that a step gives are: JAX does more for an array that is exported for the first time.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from tensordict import TensorDict
from torch.utils import _pytree

import tdbridge
from benchmarks.case import Case, Contenders, Goal, Run
from benchmarks.compare import flat_values

COUNTS, MAIN = (10, 100, 1_000, 10_000), 1_000
HAS_TORCH2JAX = find_spec("wrap_torch2jax") is not None


class Bindings(NamedTuple):
    """The private functions beneath both frameworks' `from_dlpack`."""

    from_tensor: Callable[..., Any]
    to_array: Callable[..., Any]
    from_array: Callable[..., Any]
    to_tensor: Callable[..., Any]


def find_bindings() -> Bindings | None:
    """Return the bindings, or None where these versions have none of those names."""
    try:
        from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

        return Bindings(
            torch._C._to_dlpack,
            _jax.dlpack_managed_tensor_to_buffer,
            _jax.buffer_to_dlpack_managed_tensor,
            torch._C._from_dlpack,
        )
    except (ImportError, AttributeError):
        return None


BINDINGS = find_bindings()


def cases(quick: bool) -> Iterable[Case]:
    """Return the cases; `quick` leaves out the trees of 10,000 leaves."""
    _note_absent()
    counts = [count for count in COUNTS if not quick or count <= MAIN]
    to_jax = (Goal(1 / 5, "from_dlpack"), *_goals(1.5))
    to_torch = (Goal(1 / 3, "from_dlpack"), *_goals(2))
    for count in counts:
        yield Case(f"to_jax-{count}", partial(_to_jax, count), to_jax if count == MAIN else None)
    yield Case(f"to_jax-{MAIN}-consolidated", partial(_to_jax, MAIN, tdbridge.consolidate), to_jax)
    for count in counts:
        goal = to_torch if count == MAIN else None
        yield Case(f"to_torch-{count}", partial(_to_torch, count), goal)
    yield Case(f"to_torch-{MAIN}-again", partial(_to_torch, MAIN, again=True), to_torch)
    yield Case(f"packed-{MAIN}", partial(_packed, MAIN), Goal(1 / 200, "from_dlpack"))
    if not quick:
        yield Case(f"packed-{COUNTS[-1]}", _packed_beside_fewer, Goal(1.2, "floor"))
    yield Case(f"consolidate-{MAIN}", partial(_consolidate, MAIN), Goal(1 / 4, "tensordict"))
    yield Case(f"refill-{MAIN}", partial(_refill, MAIN), Goal(1 / 15, "tensordict"))
    yield Case(f"flatten-{MAIN}", partial(_flatten, MAIN), Goal(1, "torch"))


def _goals(ratio: float) -> tuple[Goal, ...]:
    """The goals against those who may be absent."""
    binding = () if BINDINGS is None else (Goal(ratio, "binding"),)
    return (*binding, Goal(1 / 5, "torch2jax")) if HAS_TORCH2JAX else binding


def _note_absent() -> None:
    if not HAS_TORCH2JAX:
        print("wrap_torch2jax is not installed, and does not compete.", file=sys.stderr)
    if BINDINGS is None:
        print("jaxlib or torch has no DLPack binding of that name: left out.", file=sys.stderr)


def _flat(count: int) -> TensorDict:
    # Of equal length, so that JAX, which sorts the keys of a dict, leaves them in order.
    return TensorDict({f"x{i:05}": torch.rand(16) for i in range(count)}, batch_size=[])


# --- crossing over


def _to_jax(count: int, prepare: Callable[[TensorDict], TensorDict] | None = None) -> Contenders:
    td = _flat(count) if prepare is None else prepare(_flat(count))
    tdbridge.to_jax(td, copy=False)  # raises unless every leaf is shared
    tensors = td.to_dict()
    peers: dict[str, Run] = {
        "from_dlpack": lambda: jax.tree.map(jax.dlpack.from_dlpack, tensors),
    }
    if BINDINGS is not None:
        peers["binding"] = _bare_to_jax(BINDINGS, list(tensors.values()))
    if HAS_TORCH2JAX and count == MAIN:
        from wrap_torch2jax import tree_t2j

        peers["torch2jax"] = lambda: tree_t2j(tensors)  # pyright: ignore[reportArgumentType]
    return Contenders(lambda: tdbridge.to_jax(td), peers, values=partial(_by_key, list(tensors)))


def _bare_to_jax(bindings: Bindings, tensors: list[torch.Tensor]) -> Run:
    from_tensor, to_array, cpu = *bindings[:2], jax.local_devices(backend="cpu")[0]
    return lambda: [to_array(from_tensor(tensor.detach()), cpu, None) for tensor in tensors]


class Arrays(NamedTuple):
    """The same arrays as each contender takes them."""

    tree: Any
    named: dict[str, jax.Array]
    bare: list[jax.Array]


def _to_torch(count: int, *, again: bool = False) -> Contenders:
    td = _flat(count)
    keys = list(map(str, td.keys()))

    def make() -> Arrays:
        tree = tdbridge.to_jax(td, copy=True)
        return Arrays(tree, dict(tree), list(tree.values()))

    peers: dict[str, Run] = {"from_dlpack": lambda a: jax.tree.map(torch.from_dlpack, a.named)}
    if BINDINGS is not None:
        *_, from_array, to_tensor = BINDINGS
        peers["binding"] = lambda a: [to_tensor(from_array(array)) for array in a.bare]
    if HAS_TORCH2JAX and count == MAIN:
        from wrap_torch2jax import tree_j2t

        peers["torch2jax"] = lambda a: tree_j2t(a.named)  # pyright: ignore[reportArgumentType]
    made = make()
    return Contenders(
        lambda a: tdbridge.to_torch(a.tree),
        peers,
        fresh=(lambda: made) if again else make,
        values=partial(_by_key, keys),
    )


def _by_key(keys: list[str], result: Any) -> Mapping[str, np.ndarray]:
    """The values of a result; those of a bare list get the keys that its leaves had."""
    named = dict(zip(keys, result, strict=True)) if isinstance(result, list) else result
    return flat_values(named)


# --- one buffer


def _packed(count: int) -> Contenders:
    together = tdbridge.consolidate(_flat(count))
    tensors = together.to_dict()
    return Contenders(
        lambda: tdbridge.to_jax(together, packed=True),
        {"from_dlpack": lambda: jax.tree.map(jax.dlpack.from_dlpack, tensors)},
    )


def _packed_beside_fewer() -> Contenders:
    """The floor is the same of a tree with fewer leaves, whose number should not matter."""
    many, few = (tdbridge.consolidate(_flat(count)) for count in (COUNTS[-1], MAIN))
    return Contenders(
        lambda: tdbridge.to_jax(many, packed=True), floor=lambda: tdbridge.to_jax(few, packed=True)
    )


def _consolidate(count: int) -> Contenders:
    td = _flat(count)
    return Contenders(
        lambda: tdbridge.consolidate(td),
        {"tensordict": lambda: td.consolidate(metadata=True)},
        floor=_one_copy(td),
    )


def _refill(count: int) -> Contenders:
    td, out = _flat(count), tdbridge.consolidate(_flat(count))
    return Contenders(
        lambda: tdbridge.consolidate(td, out=out),
        {"tensordict": lambda: td.consolidate(metadata=True)},
        floor=_one_copy(td),
    )


def _one_copy(td: TensorDict) -> Run:
    leaves: list[Any] = list(td.values())
    whole = torch.cat(leaves)
    return lambda: torch.cat(leaves, out=whole)


# --- pytrees


def _flatten(count: int) -> Contenders:
    td = _flat(count)
    return Contenders(
        lambda: jax.tree.unflatten(*reversed(jax.tree.flatten(td))),
        {"torch": lambda: _pytree.tree_unflatten(*_pytree.tree_flatten(td))},
    )
