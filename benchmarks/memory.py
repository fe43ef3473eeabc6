"""The peak of the memory that a call takes, as Linux counts it."""

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.case import Run

# A process and not a thread: a call that holds the GIL would stop a thread from sampling.
_SAMPLER = """
import select, sys
peak = 0
while True:
    done = select.select([sys.stdin], [], [], 0.0005)[0]
    with open(f"/proc/{sys.argv[1]}/status") as status:
        line = next(line for line in status if line.startswith("RssAnon:"))
    if not peak:
        print("ready", flush=True)
    peak = max(peak, int(line.split()[1]))
    if done:
        break
print(peak)
"""


def peak_mb(run: Run) -> float:
    """Return by how many megabytes (10**6 bytes) the process grows, at most, while ``run`` runs.

    Only anonymous memory counts, that is what was allocated: not the pages of a mapped file, which
    the kernel may drop. Memory that the process still had free is returned to the kernel first.
    """
    _release_free_memory()
    command = [sys.executable, "-S", "-E", "-c", _SAMPLER, str(os.getpid())]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as sampler:
        assert sampler.stdout is not None
        sampler.stdout.readline()
        before = rss_anon_kb()
        result = run()
        # While the result is alive, so that it counts even if the call was too short to be sampled.
        after = rss_anon_kb()
        del result
        sampled = int(sampler.communicate()[0])
    return max(0, max(sampled, after) - before) * 1024 / 1e6


def rss_anon_kb() -> int:
    """Return the anonymous memory of this process that is resident, in kibibytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def _release_free_memory() -> None:
    gc.collect()
    libc = ctypes.CDLL(None)
    # glibc has it; musl does not.
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
