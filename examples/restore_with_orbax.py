"""Restore a checkpoint with Orbax alone, and write its arrays into an .npz file.

    python restore_with_orbax.py CHECKPOINT OUTPUT.npz

`digits.py` runs this in a process of its own, to show that what tdbridge saved is an ordinary Orbax
checkpoint.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp


def main(checkpoint: Path, output: Path) -> None:
    """Restore `checkpoint`; write each array under its name, the parts joined by dots."""
    tree = ocp.load(str(checkpoint))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    np.savez(output, **dict(zip(names, (leaf for _, leaf in leaves), strict=True)))
    for module in ("tdbridge", "torch"):
        if module in sys.modules:
            sys.exit(f"{module} was imported, so this shows nothing")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
