"""Trees that go to other processes: collectives over gloo, pickle, calls of a Ray actor.

Most leaves are 16 float32, so that what is done per leaf shows. The collectives run on two ranks of
one machine; the first one is timed, and where one of the two receives, it is that one.
"""

import logging
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from tensordict._reductions import _reduce_td

import tdbridge
from benchmarks.case import Case, Contenders, Goal
from benchmarks.compare import flat_values
from benchmarks.suites._second_rank import on_two_ranks
from tdbridge import collectives

COUNT, TIMES = 1_000, 20
LARGE, LARGE_COUNT = 1_000_000, 10  # elements of a leaf: 4 MB
BUCKET = 1_000_000
HAS_RAY = find_spec("ray") is not None


def cases(quick: bool) -> Iterable[Case]:
    """Return the cases; `quick` leaves out those of Ray, which takes long to start."""
    reduced = (Goal(1 / 20, "bucketed"), Goal(1.5, "floor"))
    moved = (Goal(1 / 5, "tensordict"), Goal(1.5, "floor"))
    half = Goal(1 / 2, "tensordict")
    yield Case(f"all_reduce-{COUNT}", _ranked(_all_reduce, COUNT, True), reduced)
    yield Case(f"all_reduce-{COUNT}-apart", _ranked(_all_reduce, COUNT, False))
    build = partial(on_two_ranks, partial(_all_reduce_large, LARGE_COUNT, LARGE))
    best = tuple(Goal(1, name) for name in ("per leaf", "bucketed", "flat"))
    yield Case("all_reduce-large", build, best, "ms")
    yield Case(f"broadcast-{COUNT}", _ranked(_broadcast, COUNT), moved)
    yield Case(f"all_gather-{COUNT}", _ranked(_all_gather, COUNT, True), moved)
    yield Case(f"all_gather-{COUNT}-list", _ranked(_all_gather, COUNT, False), moved)
    yield Case(f"all_gather-{COUNT}-out", _ranked(_all_gather, COUNT, True, True), moved)
    for name, prepare in _PREPARED.items():
        yield Case(f"pickle-{COUNT}{name}", partial(_pickle, COUNT, prepare), half)
    if not HAS_RAY:
        print("ray is not installed: its cases are left out.", file=sys.stderr)
    elif not quick:
        yield Case(f"ray-{COUNT}", partial(_ray, COUNT, False), half)
        yield Case(f"ray-{COUNT}-consolidated", partial(_ray, COUNT, True), half)


def _ranked(build: Callable[..., Contenders], *args: Any) -> Callable[[], Contenders]:
    return partial(on_two_ranks, partial(build, *args), TIMES)


def _flat(count: int, size: int = 16) -> TensorDict:
    """Other values on each rank, the same each time."""
    seed = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    keys = [f"x{i:05}" for i in range(count)]
    return TensorDict({key: torch.rand(size, generator=seed) for key in keys}, batch_size=[])


def _joined(td: TensorDict) -> torch.Tensor:
    leaves: list[Any] = list(td.values())
    return torch.cat(leaves)


# --- collectives: what is reduced in place grows to infinity, which takes no longer to add


def _all_reduce(count: int, together: bool) -> Contenders:
    own = tdbridge.consolidate(_flat(count)) if together else _flat(count)
    theirs, bare = _flat(count), _joined(_flat(count))
    return Contenders(
        lambda: collectives.all_reduce(own),
        {"bucketed": lambda: _in_place(theirs, bucket_bytes=BUCKET)},
        floor=lambda: dist.all_reduce(bare),
    )


def _in_place(td: TensorDict, **options: Any) -> TensorDict:
    td.all_reduce(**options)
    return td


def _all_reduce_large(count: int, size: int) -> Contenders:
    own, per_leaf, bucketed = tdbridge.consolidate(_flat(count, size)), *_two(count, size)
    flat = _joined(_flat(count, size))
    views = TensorDict(dict(zip(own.keys(), flat.split(size), strict=True)), batch_size=[])

    def reduce_flat() -> TensorDict:
        dist.all_reduce(flat)
        return views

    peers = {
        "per leaf": lambda: _in_place(per_leaf),
        "bucketed": lambda: _in_place(bucketed, bucket_bytes=BUCKET),
        "flat": reduce_flat,
    }
    return Contenders(lambda: collectives.all_reduce(own), peers)


def _two(count: int, size: int) -> tuple[TensorDict, TensorDict]:
    return _flat(count, size), _flat(count, size)


def _broadcast(count: int) -> Contenders:
    td = tdbridge.consolidate(_flat(count))
    theirs = _flat(count).consolidate(metadata=True) if dist.get_rank() == 1 else TensorDict()
    bare = _joined(_flat(count))
    return Contenders(
        lambda: collectives.broadcast(td, src=1),
        {"tensordict": lambda: theirs.broadcast(src=1)},
        floor=lambda: dist.broadcast(bare, src=1),
    )


def _all_gather(count: int, stacked: bool, again: bool = False) -> Contenders:
    td, theirs = tdbridge.consolidate(_flat(count)), _flat(count).consolidate(metadata=True)
    out = collectives.all_gather(td) if again else None
    bare = _joined(_flat(count))
    return Contenders(
        lambda: collectives.all_gather(td, stacked=stacked, out=out),
        {"tensordict": theirs.all_gather},
        floor=lambda: dist.all_gather([torch.empty_like(bare) for _ in range(2)], bare),
        values=_stacked_values,
    )


def _stacked_values(result: Any) -> Mapping[str, np.ndarray]:
    """Of one tree with a dimension more, or of a list of trees."""
    if not isinstance(result, Sequence):
        return flat_values(result)
    every = [flat_values(tree) for tree in result]
    return {key: np.stack([values[key] for values in every]) for key in every[0]}


# --- pickle


class Stock:
    """A TensorDict that goes as stock sends it: importing tdbridge changes how pickle does."""

    def __init__(self, td: TensorDict) -> None:
        self.td = td

    def __reduce__(self) -> Any:
        return _reduce_td(self.td)


def _packed(td: TensorDict) -> Any:
    return tdbridge.to_jax(td, packed=True)


_PREPARED: dict[str, Callable[[Any], Any]] = {
    "": lambda td: td,
    "-arraydict": tdbridge.to_jax,
    "-packed": _packed,
}


def _pickle(count: int, prepare: Callable[[TensorDict], Any]) -> Contenders:
    tree = prepare(tdbridge.consolidate(_flat(count)))
    stock = Stock(_flat(count).consolidate(metadata=True))
    return Contenders(lambda: _there_and_back(tree), {"tensordict": lambda: _there_and_back(stock)})


def _there_and_back(tree: Any) -> Any:
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(tree, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(message, buffers=buffers)


# --- Ray


class Echo:
    """An actor that gives back what it gets, as stock sends it or as we do."""

    def ours(self, tree: Any) -> Any:
        return tree

    def stock(self, tree: Any) -> Any:
        return Stock(tree)


@cache
def _actor() -> Any:
    import ray

    ray.init(
        num_cpus=1, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip
    tdbridge.sending.register_ray()
    return ray.remote(num_cpus=1)(Echo).remote()


def _ray(count: int, consolidated: bool) -> Contenders:
    """One tree, sent as it is: apart, so that each side consolidates it in each call, or not."""
    import ray

    actor, td = _actor(), _flat(count)
    own = tdbridge.consolidate(td) if consolidated else td
    theirs = td.consolidate(metadata=True) if consolidated else td
    return Contenders(
        lambda: ray.get(actor.ours.remote(own)),
        {"tensordict": lambda: ray.get(actor.stock.remote(Stock(_consolidated(theirs))))},
    )


def _consolidated(td: TensorDict) -> TensorDict:
    return td if td.is_consolidated() else td.consolidate(metadata=True)
