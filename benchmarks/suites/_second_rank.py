"""A second rank for cases that need one: a process that does whatever the first one does.

Both build the same contenders. Before each of its calls the first rank names the contender on a
pipe, and the second one calls its own of that name.
"""

import atexit
import gc
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import repeat
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from benchmarks.case import Contenders, Run

WORLD = 2


def on_two_ranks(build: Callable[[], Contenders], times: int = 1) -> Contenders:
    """The contenders that `build` makes, each called in both processes; the first one is timed.

    Args:
        build: a function of a module, or a `partial` of one: it is sent to the second rank by name.
        times: how often one call does the work, so that the word to the second rank does not count.
    """
    second = _second_rank()
    second.send((build, times))
    own = build()
    named = {name: _with_second(second, name, run, times) for name, run in own.runs().items()}
    ours, floor = named.pop("ours"), named.pop("floor", None)
    return replace(own, ours=ours, peers=named, floor=floor, times=times)


def _with_second(second: Connection, name: str, run: Run, times: int) -> Run:
    def both() -> Any:
        second.send(name)
        return _last_of(run, times)

    return both


def _last_of(run: Run, times: int) -> Any:
    result = None
    for _ in repeat(None, times):
        result = run()
    return result


@cache
def _second_rank() -> Connection:
    """The way to the second rank, which is started when it is first asked for."""
    store = _tcp_store(0, is_master=True)
    context = multiprocessing.get_context("spawn")  # a fork would have half of JAX's threads
    ours, theirs = context.Pipe()
    context.Process(target=_serve, args=(theirs, store.port), daemon=True).start()
    theirs.close()
    _join(store, 0)
    atexit.register(close)
    return ours


def close() -> None:
    """End the second rank and the process group."""
    if not _second_rank.cache_info().currsize:
        return
    _second_rank().send(None)
    _second_rank().close()
    _second_rank.cache_clear()
    atexit.unregister(close)
    dist.destroy_process_group()


def _tcp_store(port: int, is_master: bool = False) -> Any:
    store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    return store("127.0.0.1", port, WORLD, is_master=is_master, wait_for_workers=False)


def _join(store: Any, rank: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)


# --- in the second rank


def _serve(connection: Connection, port: int) -> None:
    _join(_tcp_store(port), 1)
    runs: dict[str, Run] = {}
    times = 1
    gc.disable()  # as in the first one while it times
    while (message := connection.recv()) is not None:
        if isinstance(message, str):
            _last_of(runs[message], times)
            continue
        build, times = message
        runs = build().runs()
        gc.collect()
    dist.destroy_process_group()
