"""What cannot be held is an error that names it, before any file is written."""

from collections import namedtuple
from enum import IntEnum
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
)

import tdbridge
from tdbridge import checkpoint
from tdbridge.errors import CheckpointError

Pair = namedtuple("Pair", "a b")


class Color(IntEnum):
    """Would come back as a plain int."""

    RED = 1


UNEQUAL_KEYS = LazyStackedTensorDict(
    TensorDict({"a": torch.ones(1)}), TensorDict({"a": torch.ones(1), "b": torch.ones(1)})
)
UNEQUAL_SHAPES = LazyStackedTensorDict(
    TensorDict({"a": torch.ones(1)}), TensorDict({"a": torch.ones(2)})
)

RAGGED = TensorDict(
    {"r": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)}, [2]
)
UNBATCHED = TensorDict({"n": TensorDict({"s": UnbatchedTensor(torch.ones(3))}, [3])})

BOTH = {
    "collision": ({"a.b": 1, "a": {"b": 2}}, r"\['a\.b'\] and \['a'\]\['b'\] .* stored as 'a\.b'"),
    "list collision": ({"l": [1], "l.0": 2}, r"\['l'\]\[0\] and \['l\.0'\]"),
    "tensordict collision": (
        TensorDict({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}),
        r"\['a\.b'\] and \['a'\]\['b'\]|\['a'\]\['b'\] and \['a\.b'\]",
    ),
    "int key": ({"x": {0: torch.ones(1)}}, r"\['x'\]: got the key 0 of type int"),
    "named tuple": ({"x": [Pair(1, 2)]}, r"\['x'\]\[0\]: got the named tuple Pair.*_asdict"),
    "set": ({"x": {"y": {1}}}, r"\['x'\]\['y'\]: got set"),
    "bytes": ({"x": b"1"}, r"\['x'\]: got bytes"),
    "complex": ({"x": 1j}, r"\['x'\]: got complex"),
    "enum": ({"x": Color.RED}, r"\['x'\]: got Color"),
    "object array": ({"x": np.array([None])}, r"\['x'\]: got dtype dtype\('O'\)"),
    "string array": ({"x": np.array(["a"])}, r"\['x'\]: got dtype dtype\('<U1'\)"),
    "dates": ({"x": np.array(["2020"], "datetime64[s]")}, r"\['x'\]: got dtype"),
    "sparse": (
        {"x": torch.eye(2).to_sparse()},
        r"\['x'\]: got a tensor of layout torch.sparse_coo",
    ),
    "meta": ({"x": torch.ones(2, device="meta")}, r"\['x'\]: got a tensor on the meta device"),
    "random key": ({"x": jax.random.key(0)}, r"\['x'\]"),
    "non-tensor list": (
        TensorDict({"x": NonTensorData([1, 2])}),
        r"\['x'\]: got a non-tensor entry of type list",
    ),
    "non-tensor stack": (
        TensorDict({"x": NonTensorStack(NonTensorData("a"), NonTensorData("b"))}, [2]),
        r"\['x'\]: got a non-tensor entry of type NonTensorStack",
    ),
    "unequal keys": ({"s": UNEQUAL_KEYS}, r"\['s'\]: got a lazy stack of unequal .*keys differ"),
    "unequal shapes": ({"s": UNEQUAL_SHAPES}, r"\['s'\]: got a lazy stack of unequal"),
    "lazy stack in jax": (
        {"s": tdbridge.to_jax(UNEQUAL_SHAPES)},
        r"\['s'\]: got a LazyStackedTensorDict, whose class",
    ),
    "jagged in jax": (tdbridge.to_jax(RAGGED), r"\['r'\]: got a NestedTensor, whose class"),
    "unbatched": (UNBATCHED, r"\['n'\]\['s'\]: got a leaf that is not batched"),
    "unbatched in jax": (
        tdbridge.to_jax(UNBATCHED),
        r"\['n'\]\['s'\]: got a leaf that is not batched",
    ),
    "list root": ([torch.ones(1)], "the root has to be"),
    "tensor root": (torch.ones(1), "the root has to be"),
    "empty root": ({}, "the root has to be"),
}


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("format_", ["dcp", "orbax"])
def test_neither_format_loses_it_silently(tmp_path, format_, name):
    """The message names the path; nothing is written."""
    tree, message = BOTH[name]
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path / "c", tree, format=format_)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (
            torch.zeros(0, 3),
            r"got the empty shape \(0, 3\), which Orbax refuses. Use format=\"dcp\"",
        ),
        (2**63, r"got 9223372036854775808, and Orbax holds 64-bit integers only\."),
        (np.zeros(2, ml_dtypes.float8_e4m3), "got dtype float8_e4m3, which Orbax refuses"),
        (
            torch.empty(2, dtype=torch.float4_e2m1fn_x2),
            r"got dtype float4_e2m1fn_x2, which numpy has not\.",
        ),
    ],
)
def test_what_orbax_refuses_is_named(tmp_path, leaf, message):
    """Orbax's own limits are found before it has written a part."""
    with pytest.raises(CheckpointError, match=r"\['p'\]\['w'\]: " + message):
        checkpoint.save(tmp_path / "c", {"p": {"v": 1, "w": leaf}}, format="orbax")
    assert list(tmp_path.iterdir()) == []


def test_a_traced_array_is_refused(tmp_path):
    """Inside jit there are no values to save."""

    def step(x):
        checkpoint.save(tmp_path / "c", {"x": x})
        return x

    with pytest.raises(CheckpointError, match=r"\['x'\]: cannot be read as an array"):
        jax.jit(step)(1.0)


def test_arguments_are_checked(tmp_path):
    """A misspelt format or framework names the choices."""
    wrong: Any = "zip"
    with pytest.raises(ValueError, match=r"\['dcp', 'orbax'\], got 'zip'"):
        checkpoint.save(tmp_path / "c", {"x": 1}, format=wrong)
    with pytest.raises(ValueError, match=r"\['torch', 'jax', 'numpy'\], got 'zip'"):
        checkpoint.load(tmp_path / "c", to=wrong)


@pytest.mark.parametrize("ranks", [2, 64])
def test_several_processes_are_refused(tmp_path, monkeypatch, ranks):
    """One rank of many would write its part over those of the others."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    with pytest.raises(CheckpointError, match=f"got {ranks} processes"):
        checkpoint.save(tmp_path / "c", {"x": 1})
