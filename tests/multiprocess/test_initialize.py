"""initialize_jax: what it starts, what it says when it cannot, and how a job ends."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
import torch.distributed as dist
from torch.distributed.tensor import Shard

from tdbridge.convert.dtensor import dtensor_to_array
from tdbridge.distributed import initialize_jax
from tests.multiprocess.jobs import distributed, raised
from tests.multiprocess.pool import TIMEOUT, Pool, free_port

pytestmark = pytest.mark.xdist_group("multiprocess")

ROOT = Path(__file__).parents[2]


def processes() -> tuple[int, int, int, int]:
    return jax.process_index(), jax.process_count(), jax.device_count(), jax.local_device_count()


def test_rank_r_is_process_r(four: Pool):
    """Each rank is one process of JAX, with the devices of all."""
    assert four.run(processes) == [(rank, 4, 8, 2) for rank in range(4)]


def again() -> tuple[int, int, int, int]:
    initialize_jax()
    initialize_jax("192.0.2.1:1")  # not looked at any more
    return processes()


def test_a_second_call_does_nothing(two: Pool):
    """Called again on all ranks it returns, whatever the address."""
    assert two.run(again) == [(0, 2, 4, 2), (1, 2, 4, 2)]


def collectives() -> Any:
    return getattr(jax.config, "jax_cpu_collectives_implementation")  # noqa: B009 - made at runtime


def test_jax_talks_through_gloo_on_the_cpu(two: Pool):
    """The pool takes JAX's default away before; without it no collective would work."""
    assert two.run(collectives) == ["gloo"] * 2


def convert_too_early() -> str:
    return raised(dtensor_to_array, distributed((2,), [Shard(0)], (8,), "float32"))


def start_backend_on(rank: int) -> None:
    if dist.get_rank() == rank:
        jax.devices()


def initialized() -> str:
    return raised(initialize_jax)


def test_a_dtensor_before_initialize_jax(torch_alone: Pool):
    """torch.distributed alone: the error says what to call, and it can still be called then."""
    for rank, error in enumerate(torch_alone.run(convert_too_early)):
        assert error == (
            f"LeafTypeError: got a mesh of ranks while JAX runs alone in this process (rank {rank} "
            "of 2): call tdbridge.distributed.initialize_jax() right after init_process_group(), "
            "before JAX is used. Or convert plain tensors: dtensor.to_local(), "
            "dtensor.full_tensor()."
        )
    assert torch_alone.run(initialized) == ["", ""]
    assert torch_alone.run(convert_too_early) == ["", ""]


def initialized_at(address: str) -> tuple[int, int, int, int]:
    os.environ["MASTER_ADDR"] = "192.0.2.1"  # of no host
    initialize_jax(address if dist.get_rank() == 0 else None)
    return processes()


def test_the_address_of_the_coordinator_is_what_rank_0_says(torch_alone: Pool):
    """An address that is passed is used and sent to the others; MASTER_ADDR is not looked at."""
    found = torch_alone.run(initialized_at, f"127.0.0.1:{free_port()}")
    assert found == [(0, 2, 4, 2), (1, 2, 4, 2)]


def test_a_backend_that_runs_already_is_named_on_every_rank(torch_alone: Pool):
    """When JAX is late on one rank all of them raise, none waits, and the error names that one."""
    torch_alone.run(start_backend_on, 1)
    expected = (
        "DistributedError: JAX's backend runs already on ranks [1], alone: call initialize_jax() "
        "before anything that starts it, such as jax.devices(), jax.device_put or tdbridge.to_jax."
    )
    assert torch_alone.run(initialized) == [expected] * 2


def start_jax_on(rank: int) -> None:
    if dist.get_rank() == rank:
        jax.distributed.initialize(f"127.0.0.1:{free_port()}", 1, 0)


def test_jax_that_is_in_another_job_is_named_on_every_rank(torch_alone: Pool):
    """jax.distributed on some of the ranks is not taken for the job's."""
    torch_alone.run(start_jax_on, 0)
    expected = "DistributedError: jax.distributed is initialised on ranks [0] alone, of 2: leave it"
    assert all(error.startswith(expected) for error in torch_alone.run(initialized))


def start_jax_reversed(port: int) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, 1 - dist.get_rank())


def test_another_numbering_is_refused(torch_alone: Pool):
    """Where rank r is not JAX's process r, boxes would be in each other's place."""
    torch_alone.run(start_jax_reversed, free_port())
    assert torch_alone.run(initialized) == ["", ""]
    for rank, error in enumerate(torch_alone.run(convert_too_early)):
        assert f"rank {rank} of 2 is JAX's process {1 - rank} of 2: number them alike" in error


def test_without_a_process_group_it_says_what_to_call_first():
    """The order of the calls is part of the error."""
    with pytest.raises(
        RuntimeError, match=r"call torch\.distributed\.init_process_group\(\) first"
    ):
        initialize_jax()


def test_a_job_of_one_rank_needs_no_jax_distributed():
    """One rank: nothing is started, although JAX's backend runs here."""
    jax.devices()
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        initialize_jax()
        assert not jax.distributed.is_initialized()
    finally:
        dist.destroy_process_group()


# --- how a job ends

JOB = """
import os, sys
import jax, jax.numpy as jnp, torch, torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
import tdbridge.distributed
from tdbridge.convert.dtensor import dtensor_to_array

rank, port = int(sys.argv[1]), sys.argv[2]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
dist.init_process_group("gloo", rank=rank, world_size=2)
tdbridge.distributed.initialize_jax()
dtensor = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (2,)), [Shard(0)])
total = float(jnp.sum(dtensor_to_array(dtensor)))
if rank == 0:
    dist.destroy_process_group()
print(total)
"""


def outcome(folder: Path) -> list[tuple[int, str]]:
    """(Exit status, all that it wrote) of two interpreters that shut JAX down by no word."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((folder / str(rank)).open("w+")) for rank in range(2)]
        started = [
            subprocess.Popen(
                [sys.executable, "-c", JOB, str(rank), str(port)],
                cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            )
            for rank, file in enumerate(files)
        ]  # fmt: skip
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TIMEOUT)
        for process in started:
            process.kill()
        return [(p.wait(), (folder / str(rank)).read_text()) for rank, p in enumerate(started)]


def test_a_job_ends_by_itself(tmp_path: Path):
    """Whether a rank destroys torch's group or leaves it alone, it ends with status 0."""
    found = outcome(tmp_path)
    assert [status for status, _ in found] == [0, 0], found
    assert all(text.endswith("8.0\n") for _, text in found)
