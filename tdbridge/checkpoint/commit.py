"""All or nothing: a checkpoint is written beside its place and moved there when it is complete.

Write, fsync, rename: whoever looks at the place sees the old checkpoint or the new one, never half
of one, and a machine that stops in between has at least one of them on its disk.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Gives a path to write a directory to, which becomes `path` when the block has ended well.

    What stood at `path` is kept until then and removed after that. When the block fails, `path` is
    as it was and nothing else is left.

    Raises:
        OSError: the directory cannot be made, synced or moved.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp()) / "step-1"
        >>> with written_beside(place) as new:
        ...     new.mkdir()
        ...     size = (new / "data").write_text("0123")
        >>> (place / "data").read_text()
        '0123'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".tdbridge-", dir=path.parent))
    try:
        new = staging / "new"
        yield new
        _sync_tree(new)
        _move(new, path, aside=staging.with_suffix(".old"))
        _sync(path.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _move(new: Path, path: Path, aside: Path) -> None:
    if not os.path.lexists(path):
        new.rename(path)
        return
    # A directory cannot be renamed over a full one. `aside` lies outside the staging directory, so
    # that no cleaning up can touch the old checkpoint before the new one is in its place.
    path.rename(aside)
    try:
        new.rename(path)
    except BaseException:
        aside.rename(path)
        raise
    _sync(path.parent)
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _sync_tree(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for name in files:
            _sync(Path(directory, name))
        _sync(Path(directory))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
