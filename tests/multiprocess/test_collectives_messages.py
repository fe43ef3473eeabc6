"""How many messages a call takes, ours and stock's: the table of docs/collectives.md."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed import distributed_c10d as c10d

import tdbridge
from tdbridge import collectives
from tdbridge.collectives import groups, reductions
from tests.multiprocess.pool import Pool

pytestmark = pytest.mark.xdist_group("multiprocess")

LEAVES, KINDS = 1_000, (torch.float32, torch.bfloat16)
PRIMITIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "all_to_all_single",
    "reduce_scatter_tensor", "send", "recv", "isend", "irecv",
)  # fmt: skip

# Messages of the first call and of each later one, on the rank that has most.
OURS = {
    "all_reduce": (1 + 2, 2),
    "all_reduce of TensorDict and ArrayDict": (1 + 2, 2),
    "all_reduce, check='always'": (1 + 2, 1 + 2),
    "all_reduce, check='never'": (2, 2),
    "reduce": (1 + 2, 2),
    "reduce_scatter": (1 + 2, 2),
    "broadcast": (1 + 1, 1),
    "broadcast to nothing": (3 + 1, 1 + 1),
    "all_gather": (1 + 1, 1),
    "gather": (1 + 1, 1),
    "scatter": (1 + 1, 1),
    "all_to_all": (1 + 1, 1),
    "send": (3, 2),
}
STOCK = {
    "all_reduce": LEAVES,
    "all_reduce, bucket_bytes": 2,
    "reduce": LEAVES,
    "reduce, bucket_bytes": 2,
    "broadcast": 2 + 1,
    "all_gather": 2 + 1,
    "send": LEAVES,
}


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts what goes through torch.distributed, and through our own connections beside it."""
    count: Counter[str] = Counter()
    inside = False

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # one primitive is made of another one
                return function(*args, **kwargs)
            inside, count[name] = True, count[name] + 1
            try:
                return function(*args, **kwargs)
            finally:
                inside = False

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in PRIMITIVES:
            function = wrapped(name, getattr(c10d, name))
            patch.setattr(c10d, name, function)
            patch.setattr(dist, name, function)
        patch.setattr(groups.Members, "exchanged", wrapped("question", groups.Members.exchanged))
        yield count


def flat(length: int = 16) -> TensorDict:
    kinds = [kind for kind in KINDS for _ in range(LEAVES // len(KINDS))]
    return TensorDict({f"x{i}": torch.ones(length).to(kind) for i, kind in enumerate(kinds)})


def ours(name: str) -> Callable[[], Any]:
    rank, own = dist.get_rank(), tdbridge.consolidate(flat())
    every = [own.clone(), own.clone()]
    mixed = (tdbridge.to_jax(own), own)[rank]  # both ranks: JAX starts on all together
    return {
        "all_reduce": lambda: collectives.all_reduce(own),
        "all_reduce of TensorDict and ArrayDict": lambda: collectives.all_reduce(mixed),
        "all_reduce, check='always'": lambda: collectives.all_reduce(own, check="always"),
        "all_reduce, check='never'": lambda: collectives.all_reduce(own, check="never"),
        "reduce": lambda: collectives.reduce(own, 0),
        "reduce_scatter": lambda: collectives.reduce_scatter(every),
        "broadcast": lambda: collectives.broadcast(own, 0),
        "broadcast to nothing": lambda: collectives.broadcast(None if rank else own, 0),
        "all_gather": lambda: collectives.all_gather(own),
        "gather": lambda: collectives.gather(own, 0),
        "scatter": lambda: collectives.scatter(own, None if rank else every, 0),
        "all_to_all": lambda: collectives.all_to_all(every),
        "send": lambda: collectives.recv(own, 0) if rank else collectives.send(own, 1),
    }[name]


def stock(name: str) -> Callable[[], Any]:
    rank, own = dist.get_rank(), flat()
    whole = flat().consolidate(metadata=True)
    return {
        "all_reduce": own.all_reduce,
        "all_reduce, bucket_bytes": lambda: own.all_reduce(bucket_bytes=1_000_000),
        "reduce": lambda: own.reduce(0),
        "reduce, bucket_bytes": lambda: own.reduce(0, bucket_bytes=1_000_000),
        "broadcast": lambda: whole.broadcast(0),
        "all_gather": whole.all_gather,
        "send": lambda: own.recv(0) if rank else own.send(1),
    }[name]


def counted(make: Callable[[str], Callable[[], Any]], name: str) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:  # a group of its own has agreed on nothing
        patch.setattr(groups, "_KNOWN", type(groups._KNOWN)())
        perform, counts = make(name), []
        for _ in range(3):
            with counting() as count:
                perform()
            counts.append(count.total())
        return counts


@pytest.mark.parametrize("name", OURS)
def test_messages_of_ours(two: Pool, name: str):
    """One for each dtype where numbers are added, else one; the question goes once."""
    first, later = OURS[name]
    assert [max(of) for of in zip(*two.run(counted, ours, name), strict=True)] == [
        first,
        later,
        later,
    ]


@pytest.mark.parametrize("name", STOCK)
def test_messages_of_stock(two: Pool, name: str):
    """What the table of the documentation says of tensordict."""
    found = [max(of) for of in zip(*two.run(counted, stock, name), strict=True)]
    assert found == [STOCK[name]] * 3


def pieces(length: int) -> tuple[int, bool]:
    own = tdbridge.consolidate(flat(length))
    address = own["x0"].data_ptr()
    collectives.all_reduce(own)
    with counting() as count:
        result = collectives.all_reduce(own)
    return count["all_reduce"], result is own and result["x0"].data_ptr() == address


def test_long_segments_go_in_pieces(two: Pool):
    """Of at most so many bytes, all in flight at once, in the buffer itself."""
    length = 2**13
    sizes = [LEAVES // len(KINDS) * length * kind.itemsize for kind in KINDS]
    expected = sum(-(-size // reductions.CHUNK) for size in sizes)
    assert expected > len(KINDS)
    assert two.run(pieces, length) == [(expected, True)] * 2
