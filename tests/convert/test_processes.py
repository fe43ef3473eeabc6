"""Two processes of jax.distributed: each converts on its own devices."""

import socket
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import sys

import jax
import numpy as np
import torch

port, rank = map(int, sys.argv[1:])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)

from tdbridge import LeafTypeError, to_jax, to_torch

tensor = torch.arange(16.0) + rank
for array in (to_jax(tensor, copy=False), to_jax(tensor, device="cpu")):
    (device,) = array.devices()
    assert device.process_index == rank, f"rank {rank}: got {device} of {device.process_index}"
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert float(array.sum()) == 120 + 16 * rank

mesh = jax.make_mesh((16,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
values = np.arange(16, dtype=np.float32)
whole = jax.device_put(values, jax.NamedSharding(mesh, jax.P()))
split = jax.device_put(values, jax.NamedSharding(mesh, jax.P("x")))
assert to_torch(whole, copy=False).tolist() == values.tolist()
locals_ = [to_torch(shard.data).item() for shard in split.addressable_shards]
assert locals_ == [8 * rank + i for i in range(8)]
try:
    to_torch({"split": split, "whole": whole})
except LeafTypeError as error:
    assert "['split']: got an array with shards in other processes" in str(error), error
    assert "whole" not in str(error), error
else:
    raise AssertionError("an array of which half is elsewhere was converted")

local = to_jax(torch.arange(8.0) + 8 * rank, copy=False)
shards = [jax.device_put(local[i : i + 1], d) for i, d in enumerate(jax.local_devices())]
again = jax.make_array_from_single_device_arrays((16,), split.sharding, shards)
assert float(jax.jit(lambda x: x.sum(), out_shardings=whole.sharding)(again)) == 120
print("done", rank)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.xdist_group("processes")
def test_each_process_converts_on_its_own_devices():
    """Arrays lie on devices of the process; what has shards in the other is refused by path."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, port, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(process.communicate) for process in processes]
        # The one that failed says why; the other would wait for it.
        wait(futures, timeout=120, return_when=FIRST_COMPLETED)
        if any(process.returncode for process in processes):
            for process in processes:
                process.kill()
        wait(futures, timeout=120)
        for process in processes:
            process.kill()
        results = [future.result() for future in futures]
    failed = {
        rank: err[-2000:] for rank, (out, err) in enumerate(results) if f"done {rank}" not in out
    }
    assert failed == {}
