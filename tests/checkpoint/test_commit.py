"""A checkpoint is complete or not there, and an old one stays until the new one is complete."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tdbridge.checkpoint as checkpoint
from tdbridge.checkpoint.api import Format
from tdbridge.errors import CheckpointError

FORMATS: list[Format] = ["dcp", "orbax"]
OLD = {"x": torch.zeros(3), "old": {"y": torch.ones(2)}}
NEW = {"x": torch.ones(3)}


def files(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*")}


def is_old(place: Path) -> bool:
    found = checkpoint.load(place)
    return torch.equal(found["x"], OLD["x"]) and torch.equal(found["old", "y"], OLD["old"]["y"])


def test_parents_are_made_and_nothing_else(tmp_path):
    """After a save the parent holds the checkpoint alone."""
    checkpoint.save(tmp_path / "a" / "b" / "c", NEW)
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["c"]


def test_paths_can_be_strings_relative_and_strange(tmp_path, monkeypatch):
    """A path is what `open` takes, spaces and percent signs included."""
    monkeypatch.chdir(tmp_path)
    for format_ in FORMATS:
        checkpoint.save(f"a b%20?#/{format_}", NEW, format=format_)
        assert torch.equal(checkpoint.load(f"a b%20?#/{format_}")["x"], NEW["x"])


@pytest.mark.parametrize("format_", FORMATS)
def test_an_existing_checkpoint_is_not_replaced_unasked(tmp_path, format_):
    """`overwrite=False` is the default, and the old checkpoint stays."""
    checkpoint.save(tmp_path / "c", OLD, format=format_)
    with pytest.raises(CheckpointError, match=r"c: exists\. .* overwrite=True"):
        checkpoint.save(tmp_path / "c", NEW, format=format_)
    assert is_old(tmp_path / "c")


@pytest.mark.parametrize("before", FORMATS)
@pytest.mark.parametrize("after", FORMATS)
def test_overwriting_leaves_no_stale_file(tmp_path, before, after):
    """The directory has exactly the files of a fresh save, in whatever format the old one was."""
    checkpoint.save(tmp_path / "c", {"td": OLD, "t": (1, 2)}, format=before)
    checkpoint.save(tmp_path / "c", NEW, format=after, overwrite=True)
    assert checkpoint.detect(tmp_path / "c") == after
    assert torch.equal(checkpoint.load(tmp_path / "c")["x"], NEW["x"])
    assert not (tmp_path / "c" / "tdbridge.json").exists()
    assert sum(name.startswith("state/_METADATA") for name in files(tmp_path / "c")) == (
        after == "orbax"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_what_is_no_checkpoint_is_never_replaced(tmp_path):
    """`overwrite=True` on somebody's directory or file is an error; an empty directory is fine."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("...")
    (tmp_path / "file").write_text("...")
    (tmp_path / "empty").mkdir()
    for name in ("thesis", "file"):
        with pytest.raises(CheckpointError, match=f"{name}: exists and is no finished checkpoint"):
            checkpoint.save(tmp_path / name, NEW, overwrite=True)
    checkpoint.save(tmp_path / "empty", NEW, overwrite=True)
    assert files(tmp_path / "thesis") == {"chapter.tex"}
    assert torch.equal(checkpoint.load(tmp_path / "empty")["x"], NEW["x"])


def fail_in_torch(monkeypatch):
    def save(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", save)
    return "dcp"


def fail_in_orbax(monkeypatch):
    from orbax.checkpoint import v1 as ocp

    def save(path, tree):
        path = Path(path)
        path.mkdir()
        (path / "part").write_text("...")
        path.with_name("new.orbax-checkpoint-tmp").mkdir()
        raise ValueError("No space left on device")

    monkeypatch.setattr(ocp, "save", save)
    return "orbax"


def fail_after_the_engine(monkeypatch):
    def write_nodes(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tdbridge.checkpoint.api.write_nodes", write_nodes)
    return "dcp"


def fail_to_move(monkeypatch):
    rename = Path.rename

    def rename_all_but_new(self, target):
        if self.name == "new":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_all_but_new)
    return "orbax"


FAILURES = [fail_in_torch, fail_in_orbax, fail_after_the_engine, fail_to_move]


@pytest.mark.parametrize("fail", FAILURES)
def test_a_failed_overwrite_leaves_the_old_checkpoint(tmp_path, monkeypatch, fail):
    """Whatever fails, and when: the old checkpoint is there, whole, and nothing beside it."""
    checkpoint.save(tmp_path / "c", OLD)
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        format_ = fail(patch)
        with pytest.raises(CheckpointError, match=r"c: .*No space left on device"):
            checkpoint.save(tmp_path / "c", NEW, format=format_, overwrite=True)
    assert files(tmp_path) == before
    assert is_old(tmp_path / "c")


@pytest.mark.parametrize("fail", FAILURES)
def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch, fail):
    """A first save that fails leaves no directory behind."""
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoint.save(tmp_path / "c", NEW, format=fail(monkeypatch))
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_stays_ctrl_c(tmp_path, monkeypatch):
    """An interrupt inside torch's writer is not turned into another error."""

    def save(*args, **kwargs):
        raise KeyboardInterrupt

    checkpoint.save(tmp_path / "c", OLD)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path / "c", NEW, overwrite=True)
    assert is_old(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


KILLED = """
import os, sys, torch
import tdbridge.checkpoint as checkpoint
import tdbridge.checkpoint.commit as commit
commit._sync_tree = lambda root: os._exit(9)
checkpoint.save(sys.argv[1], {"x": torch.ones(3)}, overwrite=True)
"""


def test_a_process_that_dies_leaves_the_old_checkpoint(tmp_path):
    """A process that ends after writing and before moving has changed nothing at the place."""
    checkpoint.save(tmp_path / "c", OLD)
    root = Path(checkpoint.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "c"], check=False, cwd=root)
    assert done.returncode == 9
    assert is_old(tmp_path / "c")
    checkpoint.save(tmp_path / "c", NEW, overwrite=True)
    assert torch.equal(checkpoint.load(tmp_path / "c")["x"], NEW["x"])


def test_importing_loads_neither_orbax_nor_tensorstore():
    """The engines are loaded by the call that needs them."""
    probe = (
        "import sys, tdbridge.checkpoint; "
        "sys.exit(bool({'orbax', 'tensorstore'} & sys.modules.keys()))"
    )
    root = Path(checkpoint.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", probe], check=False, cwd=root).returncode == 0
