"""Trees that stock has no words for, read in a process that has not imported tdbridge."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tdbridge import consolidate
from tests import zoo

READ = """
import pickle, sys
import torch
from tensordict import TensorDict

path, how = sys.argv[1:]
assert "tdbridge" not in sys.modules
if how == "weights_only":
    try:
        torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        assert "tdbridge.layout.stock" in str(error), error
        sys.exit()
    raise AssertionError("it was read without what it needs")
with open(path, "rb") as file:
    tree = pickle.load(file)
for leaf in tree.values(True, True):
    print(str(leaf.dtype), leaf.contiguous().reshape(-1).view(torch.uint8).tolist())
"""


def read_elsewhere(path: Path, how: str) -> str:
    command = [sys.executable, "-c", READ, str(path), how]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["narrow_dtypes", "reserved_keys"])
def test_a_pickle_imports_what_it_needs(name: str, tmp_path: Path):
    """Unpickled where tdbridge is not imported yet, every leaf has its dtype and its bytes."""
    tree = zoo.TREES[name]()
    (tmp_path / "tree").write_bytes(pickle.dumps(consolidate(tree)))
    expected = [
        f"{tensor.dtype} {list(zoo.as_numpy(tensor).tobytes())}"
        for tensor in zoo.leaves(tree).values()
    ]
    assert read_elsewhere(tmp_path / "tree", "pickle").splitlines() == expected


@pytest.mark.parametrize("name", ["narrow_dtypes", "reserved_keys"])
def test_where_nothing_may_be_imported_it_is_refused(name: str, tmp_path: Path):
    """torch.load(weights_only=True) without tdbridge names what is missing."""
    torch.save(consolidate(zoo.TREES[name]()), tmp_path / "tree")
    read_elsewhere(tmp_path / "tree", "weights_only")
