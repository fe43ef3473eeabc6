"""consolidate(td, filename=f): a file that `TensorDict.from_consolidated` reads."""

import collections
import enum
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdbridge import consolidate
from tdbridge.errors import LayoutError
from tests import zoo
from tests.layout.check import (
    assert_leaves_in_one_buffer,
    assert_same_leaves,
    assert_same_nodes,
    places,
)

ROOT = Path(__file__).parents[2]

# Why stock's file format has no words for a tree.
REFUSED = {
    "non_tensors": r"\['d'\]: got a dict that JSON would not give back",
    "subclass": "tests.zoo:Batch|tests.zoo.Batch",
    "narrow_dtypes": r"\['float8_e4m3fn'\] is of dtype float8_e4m3fn",
    "all_dtypes": r"\['float8_e4m3fn'\] is of dtype float8_e4m3fn",
    "reserved_keys": r"a nested tensordict is named \['size'\]",
}
CARRIED = [name for name in zoo.TREES if name not in REFUSED]


@pytest.mark.parametrize("name", CARRIED)
def test_stock_reads_the_file(name, tmp_path):
    """The same bits and tree, aligned, in the mapped file. A tensorclass at the root, as stock has
    it, comes back as a TensorDict."""
    consolidate(zoo.TREES[name](), filename=tmp_path / "file")
    found = TensorDict.from_consolidated(tmp_path / "file")
    assert_same_leaves(found, zoo.expected(name))
    assert_leaves_in_one_buffer(found)
    if name == "tensorclass":
        assert type(found) is TensorDict
        found = zoo.Step.from_tensordict(found)
    source = zoo.TREES[name]()
    if name == "tensorclass" or source.device is None:
        assert_same_nodes(found, source, order=False)


@pytest.mark.parametrize("name", CARRIED)
def test_the_result_is_the_same_tree(name, tmp_path):
    """What is returned is what consolidating in memory returns."""
    c = consolidate(zoo.TREES[name](), filename=str(tmp_path / "file"))
    assert type(c) is type(zoo.TREES[name]())
    assert c.is_locked
    assert_same_leaves(c, zoo.expected(name))
    assert_same_nodes(c, zoo.TREES[name]())
    assert_leaves_in_one_buffer(c)
    assert consolidate(c) is c


@pytest.mark.parametrize("name", CARRIED)
def test_the_file_is_the_buffer_and_its_metadata(name, tmp_path):
    """The leaves lie where the layout says, padding is zero, JSON and its length follow."""
    consolidate(zoo.TREES[name](), filename=tmp_path / "file")
    arrays = zoo.expected(name)
    starts, size = places(arrays)
    data = (tmp_path / "file").read_bytes()
    expected = bytearray(size)
    for path, array in arrays.items():
        expected[starts[path] : starts[path] + array.nbytes] = array.tobytes()
    assert data[:size] == bytes(expected)
    assert int.from_bytes(data[-8:], "little") == len(data) - size - 8
    assert data[size : size + 1] == b"{"


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_format_cannot_hold_is_refused(name, tmp_path):
    """The error says which entry and why, and no file is left."""
    with pytest.raises(LayoutError, match=REFUSED[name]):
        consolidate(zoo.TREES[name](), filename=tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        *((1, 2), {1: 2}, {"a": (1,)}, b"x", {1}, 1j, np.arange(2), torch.float32),
        *(Color.RED, collections.OrderedDict(a=1), np.float64(1.5), np.str_("x"), [Color.RED], len),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_json_would_change_is_refused(value, tmp_path):
    """Tuples, other keys, arrays, enums and subclasses of plain types would come back otherwise."""
    td = TensorDict({"n": {"x": torch.zeros(2)}})
    td["n"].set_non_tensor("bad", value)
    message = re.escape("['n', 'bad']: got a ") + ".* that JSON would not give back"
    with pytest.raises(LayoutError, match=message):
        consolidate(td, filename=tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, 10**30, -0.0, 1e300, float("nan"), float("inf")),
        *("ключ\0\ud800", [1, [2.5, None]], {"a": {"b": []}}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_json_holds_comes_back(value, tmp_path):
    """The value and its type are in the file."""
    td = TensorDict({"x": torch.zeros(2)})
    td.set_non_tensor("value", value)
    consolidate(td, filename=tmp_path / "file")
    found = TensorDict.from_consolidated(tmp_path / "file")["value"]
    assert (type(found), repr(found)) == (type(value), repr(value))


def test_writes_to_the_result_reach_the_file(tmp_path):
    """The result maps the file; a later read sees what was written in place."""
    c = consolidate(zoo.flat(), filename=tmp_path / "file")
    c["a"].fill_(7)
    assert TensorDict.from_consolidated(tmp_path / "file")["a"].tolist() == [7] * 4


def test_the_source_is_not_the_file(tmp_path):
    """A consolidated source is copied to the file, not returned; the two share nothing."""
    source = consolidate(zoo.flat())
    c = consolidate(source, filename=tmp_path / "file")
    assert c is not source
    c["a"].zero_()
    assert_same_leaves(source, zoo.expected("flat"))


def test_a_replaced_file_does_not_change_under_its_readers(tmp_path):
    """Those who map the old file keep its values; the name leads to the new, shorter one."""
    old = consolidate(zoo.many(), filename=tmp_path / "file")
    reader = TensorDict.from_consolidated(tmp_path / "file")
    consolidate(zoo.flat(), filename=tmp_path / "file")
    assert_same_leaves(old, zoo.expected("many"))
    assert_same_leaves(reader, zoo.expected("many"))
    assert_same_leaves(TensorDict.from_consolidated(tmp_path / "file"), zoo.expected("flat"))


def test_a_file_can_be_written_over_itself(tmp_path):
    """A tree that maps a file may be consolidated into that very file."""
    c = consolidate(zoo.nested(), filename=tmp_path / "file")
    consolidate(c, filename=tmp_path / "file")
    consolidate(TensorDict.from_consolidated(tmp_path / "file"), filename=tmp_path / "file")
    found = TensorDict.from_consolidated(tmp_path / "file")
    assert_same_leaves(found, zoo.expected("nested"))


def test_nothing_else_is_left_in_the_directory(tmp_path):
    """The file written beside has been renamed; a name that cannot be written leaves nothing."""
    (tmp_path / "folder").mkdir()
    consolidate(zoo.flat(), filename=tmp_path / "file")
    with pytest.raises(OSError, match="folder"):
        consolidate(zoo.flat(), filename=tmp_path / "folder")
    with pytest.raises(OSError, match="missing"):
        consolidate(zoo.flat(), filename=tmp_path / "missing" / "file")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file", tmp_path / "folder"]


def test_a_file_is_mapped_by_the_cpu(tmp_path):
    """Another device and a file exclude each other."""
    with pytest.raises(LayoutError, match=re.escape("got device='meta' with filename")):
        consolidate(zoo.flat(), filename=tmp_path / "file", device="meta")
    assert list(tmp_path.iterdir()) == []


def test_a_default_device_does_not_count(tmp_path):
    """Under another default device the file is mapped by the CPU all the same."""
    source = zoo.flat()
    with torch.device("meta"):
        c = consolidate(source, filename=tmp_path / "file")
    assert_same_leaves(c, zoo.expected("flat"))


THREADS = """
import sys, torch
from concurrent.futures import ThreadPoolExecutor
from tensordict import TensorDict
from tdbridge import consolidate

def write(i):
    return consolidate(TensorDict({"x": torch.full((50_000 + i,), float(i))}), filename=sys.argv[1])

with ThreadPoolExecutor(8) as pool:
    results = list(pool.map(write, range(64)))
last = TensorDict.from_consolidated(sys.argv[1])["x"]
print(all((r["x"] == i).all() for i, r in enumerate(results)), len(last) == 50_000 + last[0])
"""


def test_threads_may_write_one_file(tmp_path):
    """The file is one thread's whole, and each thread's result keeps its own values."""
    run: Any = subprocess.run(
        [sys.executable, "-c", THREADS, str(tmp_path / "file")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout.split()) == (0, ["True", "tensor(True)"])
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
