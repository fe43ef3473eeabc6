"""Readers that know nothing of tdbridge: each engine's own code, in a process of its own.

A reader prints, per leaf, its dtype, its shape and its bytes in hex; the test compares them with
what it wrote, worked out with numpy.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

_SHOW = """
import json, sys
import numpy as np

def show(leaf):
    if hasattr(leaf, "untyped_storage"):
        import torch
        name, shape = str(leaf.dtype).removeprefix("torch."), list(leaf.shape)
        flat = leaf.contiguous().reshape(-1).view(torch.uint8).numpy()
        return [name, shape, flat.tobytes().hex()]
    if isinstance(leaf, np.ndarray):
        return [leaf.dtype.name, list(leaf.shape), leaf.tobytes().hex()]
    return leaf
"""

_END = """
assert "tdbridge" not in sys.modules
print(json.dumps(found))
"""

# The target is built from the metadata alone; its keys are the names that DCP gave.
DCP = """
import torch
import torch.distributed.checkpoint as dcp
entries = dcp.FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata
target = {
    name: torch.empty(e.size, dtype=e.properties.dtype) if hasattr(e, "size") else None
    for name, e in entries.items()
}
dcp.load(target, checkpoint_id=sys.argv[1], no_dist=True)
found = {name: show(leaf) for name, leaf in target.items()}
"""

ORBAX_V1 = """
import jax
from orbax.checkpoint import v1 as ocp
tree = ocp.load(sys.argv[1])
assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
found = jax.tree.map(show, tree)
"""

ORBAX_V0 = """
import jax
import orbax.checkpoint as ocp
tree = ocp.StandardCheckpointer().restore(sys.argv[1] + "/state")
found = jax.tree.map(show, tree)
"""


def read_with(reader: str, path: Path) -> Any:
    """Run a reader on a checkpoint and give back what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", _SHOW + reader + _END, str(path)],
        check=False,
        capture_output=True,
        text=True,
        cwd=path.parent,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def shown(array: np.ndarray) -> list[Any]:
    """What a reader has to print for an array."""
    return [array.dtype.name, list(array.shape), array.tobytes().hex()]
