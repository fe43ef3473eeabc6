"""A checkpoint from anybody: nothing in it is executed, nothing outside its directory is read."""

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

import tdbridge.checkpoint as checkpoint
from tdbridge.errors import CheckpointError, UnsafeCheckpointError


class Evil:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def place(tmp_path):
    """A sound DCP checkpoint."""
    checkpoint.save(tmp_path / "c", {"x": torch.arange(3.0), "step": 1})
    return tmp_path / "c"


def change_metadata(place: Path, change) -> None:
    metadata = pickle.loads((place / ".metadata").read_bytes())
    change(metadata)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))


def hide_in_planner_data(metadata: Any, evil: Evil) -> None:
    metadata.planner_data["x"] = ("x", evil)


def hide_in_storage_meta(metadata: Any, evil: Evil) -> None:
    metadata.storage_meta = evil


def hide_in_a_tensor(metadata: Any, evil: Evil) -> None:
    metadata.state_dict_metadata["x"].size = evil


@pytest.mark.parametrize("hide", [hide_in_planner_data, hide_in_storage_meta, hide_in_a_tensor])
def test_code_in_the_metadata_is_refused(place, tmp_path, hide):
    """Loading names what was asked for and runs nothing; a plain unpickling would have run it."""
    marker = tmp_path / "pwned"
    change_metadata(place, lambda metadata: hide(metadata, Evil(marker)))
    with pytest.raises(UnsafeCheckpointError, match=r"\.metadata: asks for posix\.mkdir"):
        checkpoint.load(place)
    assert not marker.exists()
    pickle.loads((place / ".metadata").read_bytes())
    assert marker.exists()


def test_code_in_a_byte_item_is_refused(tmp_path):
    """The same for an item of the data file."""
    marker = tmp_path / "pwned"
    with pytest.warns(UserWarning, match="single process"):
        save({"x": torch.ones(1), "item": Evil(marker)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(UnsafeCheckpointError, match=r"__0_0\.distcp: 'item' asks for posix\.mkdir"):
        checkpoint.load(tmp_path / "c")
    assert not marker.exists()
    info = next(
        v
        for k, v in FileSystemReader(tmp_path / "c").read_metadata().storage_data.items()
        if k.fqn == "item"
    )
    data = (tmp_path / "c" / info.relative_path).read_bytes()[info.offset :][: info.length]
    torch.load(io.BytesIO(data), weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "os system",
        "builtins eval",
        "builtins getattr",
        "torch load",
        "torch.serialization load",
        "torch.hub load",
        "functools partial",
        "torch.distributed.checkpoint.metadata dataclass",
        "torch.distributed.checkpoint.metadata Metadata.__init__",
        "torch.distributed.checkpoint.filesystem os",
        "tdbridge.checkpoint save",
    ],
)
def test_a_name_outside_the_list_is_refused(place, name):
    """Only a dozen names can stand in a metadata file, whatever module they are reached through."""
    module, attribute = name.split()
    (place / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(UnsafeCheckpointError, match=f"asks for {module}.{attribute}"):
        checkpoint.load(place)


def test_a_known_class_cannot_be_changed(place):
    """A pickle that sets attributes of a class it may name changes nothing in torch."""
    before = dict(vars(Metadata))
    change = b"cMODULE\nMetadata\n(N}(Vversion\nVpwned\nutb."
    module = b"torch.distributed.checkpoint.metadata"
    (place / ".metadata").write_bytes(change.replace(b"MODULE", module))
    with pytest.raises(CheckpointError):
        checkpoint.load(place)
    assert dict(vars(Metadata)) == before


@pytest.mark.parametrize("data", [b"Pid\n.", b"\x82\x01.", b"}", b"I1\n.", b"]." * 3, b"(((("])
def test_a_pickle_of_something_else_is_an_error(place, data):
    """Persistent ids, extension codes and other pickles are damage, not crashes."""
    (place / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"\.metadata: "):
        checkpoint.load(place)


def first(metadata: Any) -> Any:
    return next(v for k, v in metadata.storage_data.items() if k.fqn == "x")


CONTRADICTIONS = {
    "an empty path": lambda m: m.planner_data.update(x=()),
    "a path that is no tuple": lambda m: m.planner_data.update(x="x"),
    "a path of floats": lambda m: m.planner_data.update(x=(0.5,)),
    "two items of one path": lambda m: m.planner_data.update(x=("step",)),
    "no planner data of a kind": lambda m: setattr(m, "planner_data", 5),
    "no storage": lambda m: m.storage_data.clear(),
    "a stream transform": lambda m: setattr(first(m), "transform_descriptors", ["zstd"]),
    "a negative offset": lambda m: setattr(first(m), "offset", -1),
    "a negative length": lambda m: setattr(first(m), "length", -1),
    "an offset that is text": lambda m: setattr(first(m), "offset", "0"),
    "fewer bytes than the shape": lambda m: setattr(first(m), "length", 11),
    "no dtype": lambda m: setattr(m.state_dict_metadata["x"].properties, "dtype", "float32"),
    "no properties": lambda m: setattr(m.state_dict_metadata["x"], "properties", None),
    "a negative size": lambda m: setattr(m.state_dict_metadata["x"], "size", (-3,)),
    "a chunk of another rank": lambda m: setattr(
        m.state_dict_metadata["x"].chunks[0], "sizes", torch.Size([3, 1])
    ),
    "an entry of no kind": lambda m: m.state_dict_metadata.update(x=3),
    "a key that is no string": lambda m: m.state_dict_metadata.update({3: None}),
}


@pytest.mark.parametrize("contradiction", CONTRADICTIONS)
def test_metadata_that_contradicts_itself_is_an_error(place, contradiction):
    """What the metadata says is checked before it is believed; the file is named."""
    change_metadata(place, CONTRADICTIONS[contradiction])
    with pytest.raises(CheckpointError, match=r"\.metadata: "):
        checkpoint.load(place)


@pytest.mark.parametrize("target", ["../secret", "/etc/hostname", "a/../../secret", "C:\\x", "x\0"])
def test_a_data_file_outside_the_directory_is_refused(place, tmp_path, target):
    """The names of data files in the metadata stay inside the checkpoint."""
    (tmp_path / "secret").write_bytes((place / "__0_0.distcp").read_bytes())

    def redirect(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = target

    change_metadata(place, redirect)
    with pytest.raises(UnsafeCheckpointError, match="outside the checkpoint"):
        checkpoint.load(place)


def test_an_orbax_name_outside_the_directory_is_refused(tmp_path):
    """Without OCDBT a leaf's name is a path; `..` in it does not lead out."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_ocdbt = False
    with context:
        ocp.save(tmp_path / "secret", {"key": np.arange(3)})
        ocp.save(tmp_path / "c", {"x": np.arange(3)})
    assert checkpoint.load(tmp_path / "c", to="numpy")["x"].tolist() == [0, 1, 2]
    file = tmp_path / "c" / "state" / "_METADATA"
    metadata = json.loads(file.read_text())
    (entry,) = metadata["tree_metadata"].values()
    entry["key_metadata"] = [{"key": "../../secret/state/key", "key_type": 2}]
    file.write_text(json.dumps(metadata))
    with pytest.raises(UnsafeCheckpointError, match="outside the checkpoint"):
        checkpoint.load(tmp_path / "c")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "nodes": []}',
        '{"version": 1}',
        '{"version": 1, "nodes": [[]]}',
        '{"version": 1, "nodes": [{"path": "x", "kind": "tuple"}]}',
        '{"version": 1, "nodes": [{"path": [true], "kind": "tuple"}]}',
        '{"version": 1, "nodes": [{"path": [], "kind": "os.system"}]}',
        '{"version": 1, "nodes": [{"path": [], "kind": "tensordict", "batch_size": [-1]}]}',
        '{"version": 1, "nodes": [{"path": [], "kind": "tensordict", "batch_size": [1.5]}]}',
        '{"version": 1, "nodes": [{"path": [], "kind": "tensordict", "names": ["a"]}]}',
        '{"version": 1, "nodes": [{"path": [], "kind": "tensordict", "batch_size": [7]}]}',
        '{"version": 1, "nodes": [{"path": ["y"], "kind": "tuple"}]}',
        '{"version": 1, "nodes": [{"path": ["x"], "kind": "tuple"}]}',
        '{"version": 1, "nodes": [{"path": ["x", "y"], "kind": "dict"}]}',
        "[" * 100_000,
    ],
)
def test_a_sidecar_that_does_not_fit_is_an_error(place, text):
    """The sidecar is checked: its form, and that it describes the tree beside it."""
    (place / "tdbridge.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tdbridge\.json"):
        checkpoint.load(place)
