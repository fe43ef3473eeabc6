"""Damage is found and its file is named; no checkpoint loads with values it was not saved with."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import tdbridge.checkpoint as checkpoint
from tdbridge.errors import CheckpointError

CUTS = {
    "all": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "last byte": lambda data: data[:-1],
}
LARGE = np.arange(5000, dtype=np.float32)
TREE = {"x": LARGE, "y": np.arange(7), "s": "text", "n": 3}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_cut_dcp_file_is_named(tmp_path, name, cut):
    """A file that lost its end is an error with its name."""
    checkpoint.save(tmp_path / "c", TREE)
    file = tmp_path / "c" / name
    file.write_bytes(CUTS[cut](file.read_bytes()))
    with pytest.raises(CheckpointError, match=name):
        checkpoint.load(tmp_path / "c")


def test_a_deleted_dcp_data_file_is_named(tmp_path):
    """A data file that is gone is an error with its name."""
    checkpoint.save(tmp_path / "c", TREE)
    (tmp_path / "c" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        checkpoint.load(tmp_path / "c")


def test_a_missing_metadata_file_is_named(tmp_path):
    """Without `.metadata` a DCP save was never finished."""
    checkpoint.save(tmp_path / "c", TREE)
    (tmp_path / "c" / ".metadata").unlink()
    with pytest.raises(
        CheckpointError, match=r"neither \.metadata \(DCP\) nor _METADATA \(Orbax\)"
    ):
        checkpoint.load(tmp_path / "c")


def test_a_missing_directory_is_named(tmp_path):
    """There is a difference between an empty directory and none."""
    with pytest.raises(CheckpointError, match="nowhere: does not exist"):
        checkpoint.load(tmp_path / "nowhere")


@pytest.mark.parametrize("fill", [b"\0", b"\xff"])
def test_overwritten_dcp_data_is_an_error(tmp_path, fill):
    """A data file of the right length and other content is an error with its name."""
    checkpoint.save(tmp_path / "c", TREE)
    file = tmp_path / "c" / "__0_0.distcp"
    file.write_bytes(fill * file.stat().st_size)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        checkpoint.load(tmp_path / "c")


def is_as_saved(place: Path) -> bool:
    found = checkpoint.load(place, to="numpy")
    same = all(np.array_equal(found[k], TREE[k]) for k in ("x", "y"))
    return same and (found["s"], found["n"]) == ("text", 3)


def test_a_damaged_orbax_file_never_changes_a_value(tmp_path):
    """Each file of the tree, cut or deleted: an error that names the place, or the same values."""
    checkpoint.save(tmp_path / "c", TREE, format="orbax")
    state = tmp_path / "c" / "state"
    harmless = []
    files = sorted(f.relative_to(state) for f in state.rglob("*") if f.is_file())
    for name in files:
        for how in [*CUTS, "delete"]:
            place = tmp_path / "d"
            shutil.copytree(tmp_path / "c", place)
            file = place / "state" / name
            content = file.read_bytes()
            file.unlink()
            if how != "delete":
                file.write_bytes(CUTS[how](content))
            try:
                assert is_as_saved(place)
                harmless.append((str(name), how))
            except CheckpointError as error:
                assert str(place) in str(error)  # noqa: PT017 - which of the two it is, is open
            shutil.rmtree(place)
    # Files of the writing process that the merged index does not point to; how many there are
    # differs from save to save.
    assert all(name.startswith("ocdbt.process_0/") for name, _ in harmless)
    assert len(harmless) < len(files) * (len(CUTS) + 1)
    assert any(not str(name).startswith("ocdbt.process_0/") for name in files)


@pytest.mark.parametrize("name", ["_METADATA", "_strings.json"])
def test_a_damaged_orbax_description_is_named(tmp_path, name):
    """JSON that does not parse is an error with the file's name."""
    checkpoint.save(tmp_path / "c", TREE, format="orbax")
    (tmp_path / "c" / "state" / name).write_text('{"tree')
    with pytest.raises(CheckpointError, match=name):
        checkpoint.load(tmp_path / "c")


def described_as(kind: str) -> str:
    """A `_METADATA` with one leaf, `x`, of this kind."""
    value = {"value_metadata": {"value_type": kind}}
    keys = {"key_metadata": [{"key": "x", "key_type": 2}]}
    return json.dumps({"tree_metadata": {"x": {**keys, **value}}})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "is malformed"),
        ('{"tree_metadata": 3}', "is malformed"),
        ('{"tree_metadata": {"x": {"key_metadata": 3}}}', "is malformed"),
        (described_as("Box"), "'x' is a 'Box'"),
        (described_as("string"), r"_strings\.json: has no string 'x'"),
    ],
)
def test_an_orbax_description_that_is_no_tree_is_an_error(tmp_path, text, complaint):
    """JSON of another form, and kinds of leaves that are not known, are named."""
    checkpoint.save(tmp_path / "c", TREE, format="orbax")
    (tmp_path / "c" / "state" / "_METADATA").write_text(text)
    with pytest.raises(CheckpointError, match=complaint):
        checkpoint.load(tmp_path / "c")


def test_orbax_data_that_is_gone_names_the_leaf(tmp_path):
    """Without the data files the error names a leaf and tensorstore's reason."""
    checkpoint.save(tmp_path / "c", TREE, format="orbax")
    shutil.rmtree(tmp_path / "c" / "state" / "ocdbt.process_0")
    with pytest.raises(CheckpointError, match=r"state: '[nxy]' cannot be read: "):
        checkpoint.load(tmp_path / "c")


def test_an_unfinished_orbax_save_is_an_error(tmp_path):
    """Orbax's working directory is not a checkpoint."""
    checkpoint.save(tmp_path / "c", TREE, format="orbax")
    (tmp_path / "c").rename(tmp_path / "c.orbax-checkpoint-tmp")
    with pytest.raises(CheckpointError, match="was never finished"):
        checkpoint.load(tmp_path / "c.orbax-checkpoint-tmp")


# --- tensors in several chunks, as several ranks write them

WHOLE = torch.arange(12.0).reshape(4, 3)
Boxes = list[tuple[tuple[int, int], tuple[int, int]]]


def write_chunks(place: Path, boxes: Boxes) -> None:
    """Writes a DCP checkpoint of `WHOLE` in one file per box (offsets, sizes)."""
    place.mkdir()
    storage, chunks = {}, []
    for i, (offsets, sizes) in enumerate(boxes):
        rows, columns = (slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        part = torch.zeros(sizes)
        inside = WHOLE[rows, columns]
        part[: inside.shape[0], : inside.shape[1]] = inside
        file = place / f"__{i}_0.distcp"
        torch.save(part, file)
        index = MetadataIndex("x", torch.Size(offsets))
        storage[index] = _StorageInfo(file.name, 0, file.stat().st_size)
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    entry = TensorStorageMetadata(TensorProperties(torch.float32), WHOLE.shape, chunks)
    metadata = Metadata({"x": entry}, planner_data={"x": ("x",)}, storage_data=storage)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (4, 3))],
        [((0, 0), (3, 3)), ((3, 0), (1, 3))],
        [((0, 0), (4, 1)), ((0, 1), (4, 2))],
        [((2, 0), (2, 3)), ((0, 0), (2, 2)), ((0, 2), (2, 1))],
        [((0, 0), (4, 3)), ((4, 0), (0, 3))],
    ],
)
def test_chunks_are_put_together(tmp_path, boxes):
    """Whatever boxes a tensor was written in, even empty ones, its values are the same."""
    write_chunks(tmp_path / "c", boxes)
    assert torch.equal(checkpoint.load(tmp_path / "c")["x"], WHOLE)


@pytest.mark.parametrize(
    ("boxes", "complaint"),
    [
        ([], "do not cover"),
        ([((0, 0), (3, 3))], "do not cover"),
        ([((0, 0), (4, 3)), ((0, 0), (1, 3))], "do not cover"),
        ([((0, 0), (3, 3)), ((2, 0), (1, 3))], "overlap"),
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "overlap"),
        ([((0, 0), (3, 3)), ((4, 0), (1, 3))], "beyond"),
        ([((0, 0), (4, 2)), ((0, 2), (2, 2))], "beyond"),
    ],
)
def test_chunks_with_gaps_or_overlaps_are_an_error(tmp_path, boxes, complaint):
    """torch leaves a gap at what the memory held; here it is an error that names the tensor."""
    write_chunks(tmp_path / "c", boxes)
    with pytest.raises(CheckpointError, match=rf"\.metadata: 'x': .*{complaint}"):
        checkpoint.load(tmp_path / "c")


def test_a_chunk_of_another_shape_or_dtype_is_an_error(tmp_path):
    """What a data file holds has to be what the metadata says."""
    write_chunks(tmp_path / "c", [((0, 0), (4, 3))])
    file = tmp_path / "c" / "__0_0.distcp"
    size = file.stat().st_size
    for other in (WHOLE.int(), WHOLE.reshape(3, 4), "a string" * 10):
        torch.save(other, file)
        file.write_bytes(file.read_bytes().ljust(size, b"\0"))
        metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.length = len(file.read_bytes())
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp: 'x'"):
            checkpoint.load(tmp_path / "c")
