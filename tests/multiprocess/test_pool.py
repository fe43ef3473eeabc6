"""The pool itself: what it hands back, and that it names the rank that fails."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

from tests.multiprocess import pool as module
from tests.multiprocess.pool import Pool

pytestmark = pytest.mark.xdist_group("multiprocess")


def gathered(value: int) -> list[int]:
    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, torch.tensor([value + dist.get_rank()]))
    return torch.cat(parts).tolist()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"what rank {rank} says")


def end_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def test_the_ranks_talk_to_each_other(two: Pool):
    """Each rank answers, in the order of the ranks, and they are one group."""
    assert two.run(gathered, 5) == [[5, 6], [5, 6]]


def test_a_rank_that_raises_is_named_and_the_pool_lives_on(two: Pool):
    """The error of a job names the rank, holds its traceback, and is that of no other rank."""
    with pytest.raises(AssertionError, match=r"rank 1: Traceback[\s\S]*what rank 1 says") as error:
        two.run(fail_on, 1)
    assert "rank 0" not in str(error.value)
    assert two.run(gathered, 0) == [[0, 1], [0, 1]]


def test_a_rank_that_ends_is_named(torch_alone: Pool):
    """A process that is gone is an error, not a test that hangs; so is each later job."""
    with pytest.raises(AssertionError, match=r"^rank 0: the process has ended\.$"):
        torch_alone.run(end_on, 0)
    with pytest.raises(AssertionError, match=r"^rank 0: the process has ended\.\nrank 1: "):
        torch_alone.run(gathered, 0)


def test_a_rank_that_hangs_is_named(torch_alone: Pool, monkeypatch: pytest.MonkeyPatch):
    """A job that does not end is ended, and the error names the rank."""
    monkeypatch.setattr(module, "TIMEOUT", 3)
    with pytest.raises(AssertionError, match=r"^rank 1: no answer within 3 s\.$"):
        torch_alone.run(hang_on, 1)
