"""A warm pool of processes, one per rank, that run functions together."""

import contextlib
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import jax
import torch
import torch.distributed as dist

from tdbridge.distributed import initialize_jax

TIMEOUT = 120
"""Seconds after which a job that has not ended on every rank is ended."""


class Pool:
    """Processes of one torch.distributed group, with JAX beside it or without.

    They are forked from a server that has imported torch and jax once.
    """

    def __init__(
        self, world: int, *, with_jax: bool = True, timeout: timedelta | None = None
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        pipes = [context.Pipe() for _ in range(world)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [context.Process(target=_work, args=(theirs,)) for _, theirs in pipes]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()  # then the end of the process is the end of the connection
        port = free_port()
        self.size = world
        self._run([(join, (rank, world, port, with_jax, timeout)) for rank in range(world)])

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """What `job(*args)` returns on each rank. Fails with the traceback of each that raised."""
        return self._run([(job, args)] * len(self._processes))

    def run_to_the_end(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """As `run`, of a job in which processes end: they give None. It is the last job."""
        answers = self._answers([(job, args)] * self.size)
        self._kill()
        return [value for value, _, _ in answers]

    def _answers(self, tasks: Sequence[Any]) -> list[tuple[Any, str, bool]]:
        deadline = time.monotonic() + TIMEOUT
        for connection, task in zip(self._connections, tasks, strict=True):
            _tell(connection, task)
        return [_answer(connection, deadline) for connection in self._connections]

    def _run(self, tasks: Sequence[Any]) -> list[Any]:
        answers = self._answers(tasks)
        if any(lost for _, _, lost in answers):
            self._kill()  # else what still runs would answer to the next job
        failures = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(answers) if text]
        assert not failures, "\n".join(failures)
        return [value for value, _, _ in answers]

    def close(self) -> None:
        """Ends the processes: in their own time, by force after the timeout."""
        for connection in self._connections:
            _tell(connection, None)
        for process in self._processes:
            process.join(TIMEOUT)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _tell(connection: Connection, task: Any) -> None:
    with contextlib.suppress(OSError):  # the process has ended: its answer will say so
        connection.send(task)


def _answer(connection: Connection, deadline: float) -> tuple[Any, str, bool]:
    """(What the job returned, the error's text, whether the process is lost.)"""
    try:
        if connection.poll(max(0, deadline - time.monotonic())):
            return *connection.recv(), False
    except (EOFError, OSError):
        return None, "the process has ended.", True
    return None, f"no answer within {TIMEOUT} s.", True


# --- in the processes


def join(rank: int, world: int, port: int, with_jax: bool, timeout: timedelta | None) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # Two devices in each process: the first stands for the rank.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    jax.config.update("jax_cpu_collectives_implementation", None)  # initialize_jax sets it
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timeout)
    if with_jax:
        initialize_jax()


def _work(connection: Connection) -> None:
    while (task := connection.recv()) is not None:
        job, args = task
        try:
            answer = job(*args), ""
        except Exception:  # noqa: BLE001 - the test is told
            answer = None, traceback.format_exc()
        connection.send(answer)
    # A process of multiprocessing runs no atexit handlers.
    dist.destroy_process_group()
    jax.distributed.shutdown()
