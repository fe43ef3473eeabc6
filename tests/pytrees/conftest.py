"""Fresh processes at the price of a fork."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# One line of JSON in, one line of JSON out, a fork for each. Nothing has started a thread yet.
SERVER = """
import io, json, os, sys, traceback
import jax, numpy, optree, tensordict, torch
for line in sys.stdin:
    job = json.loads(line)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        sys.stdout, failure = io.StringIO(), ""
        try:
            exec(compile(job, "<test>", "exec"), {"__name__": "__main__"})
        except BaseException:
            failure = traceback.format_exc()
        with os.fdopen(write, "w") as pipe:
            json.dump([sys.stdout.getvalue(), failure], pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(pipe.read() or json.dumps(["", "the process died"]), flush=True)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="session")
def fresh() -> Iterator[Callable[[str], str]]:
    """Runs code in a process that has not imported tdbridge, and gives what it printed.

    torch, tensordict, JAX and optree are imported there. Strings hash otherwise than here.
    """
    seed = "3" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        command, env=env, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        stdin, stdout = server.stdin, server.stdout
        assert stdin is not None
        assert stdout is not None

        def run(code: str) -> str:
            print(json.dumps(code), file=stdin, flush=True)
            printed, failure = json.loads(stdout.readline())
            assert not failure, failure
            return printed

        yield run
        stdin.close()
