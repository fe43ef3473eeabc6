"""JAX beside torch.distributed: one job, rank r being JAX's process r.

    torch.distributed.init_process_group("gloo")
    tdbridge.distributed.initialize_jax()

From then on a DTensor is a jax.Array over the same processes (`tdbridge.to_jax`), and back.
"""

import os
import socket
from collections.abc import Sequence
from typing import Any

import jax
import torch
import torch.distributed as dist

from tdbridge.errors import DistributedError

_MESSAGE_BYTES = 512
_FREE, _STARTED, _LATE = range(3)  # what a rank says of its JAX


def initialize_jax(coordinator_address: str | None = None, *, shutdown_timeout: int = 300) -> None:
    """Starts jax.distributed over the ranks of torch.distributed's default group.

    Collective: call it on every rank, after `torch.distributed.init_process_group` and before
    anything that starts JAX's backend (`jax.devices()`, any array). Called again, or in a job of
    one rank, it does nothing. On the CPU, JAX's processes talk through gloo.

    Nothing has to be shut down by hand. When a rank exits, JAX ends its backend and waits for the
    other ranks; torch's process group may be destroyed before, or left to the end of the process.

    Args:
        coordinator_address: `"host:port"` where rank 0 listens for the others; what rank 0 passes
            counts. None takes a free port of the host that MASTER_ADDR names, as torchrun sets it,
            or of rank 0's hostname.
        shutdown_timeout: seconds that a rank which exits, also because it failed, waits for the
            others. Then JAX ends them all. The default is JAX's.

    Raises:
        DistributedError: torch.distributed is not initialised, or JAX cannot join on some rank;
            then every rank raises, and the error names those ranks and says what to call first.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> initialize_jax()
        >>> jax.process_index(), jax.process_count()
        (0, 1)
        >>> dist.destroy_process_group()
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributedError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() "
            "first, then tdbridge.distributed.initialize_jax()."
        )
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return
    address = coordinator_address or (_free_address() if rank == 0 else "")
    states, addresses = _exchange(_state(), address)
    if set(states) == {_STARTED}:
        return
    _check(states)
    if _setting("jax_cpu_collectives_implementation") is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # One rank, one GPU: the one that torch uses here.
    gpu = torch.cuda.current_device() if "nccl" in dist.get_backend_config() else None
    jax.distributed.initialize(
        addresses[0],
        world,
        rank,
        local_device_ids=gpu,
        cluster_detection_method="deactivate",  # torch.distributed knows the cluster
        shutdown_timeout_seconds=shutdown_timeout,
    )


def _free_address() -> str:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    return f"{os.environ.get('MASTER_ADDR') or socket.gethostname()}:{port}"


def _state() -> int:
    if jax.distributed.is_initialized():
        return _STARTED
    return _LATE if _backend_runs() else _FREE


def _backend_runs() -> bool:
    """Asked by a setting that JAX only lets change before its backend starts.

    There is no other public way, and `jax.distributed.initialize` would raise on this rank alone.
    """
    count = _setting("jax_num_cpu_devices")
    try:
        jax.config.update("jax_num_cpu_devices", count + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


def _exchange(state: int, address: str) -> tuple[list[int], list[str]]:
    """What every rank says, sent as bytes: nothing that a peer sends is unpickled."""
    mine = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    content = bytes([state]) + address.encode()
    mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    mine = mine.to(_device())
    messages = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(messages, mine)
    received = [bytes(message.tolist()) for message in messages]
    return [data[0] for data in received], [data[1:].rstrip(b"\0").decode() for data in received]


def _device() -> torch.device:
    """Where the default group can send from."""
    on_cpu = "cpu:" in dist.get_backend_config()
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def _check(states: Sequence[int]) -> None:
    if late := [rank for rank, state in enumerate(states) if state == _LATE]:
        raise DistributedError(
            f"JAX's backend runs already on ranks {late}, alone: call initialize_jax() before "
            "anything that starts it, such as jax.devices(), jax.device_put or tdbridge.to_jax."
        )
    if started := [rank for rank, state in enumerate(states) if state == _STARTED]:
        raise DistributedError(
            f"jax.distributed is initialised on ranks {started} alone, of {len(states)}: leave it "
            "to initialize_jax(), or call jax.distributed.initialize() on all of them."
        )
