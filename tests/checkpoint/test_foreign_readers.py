"""What is written is read by torch and by Orbax with their own code."""

import jax.numpy as jnp
import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

import tdbridge.checkpoint as checkpoint
from tests.checkpoint.foreign import DCP, ORBAX_V0, ORBAX_V1, read_with, shown
from tests.checkpoint.trees import COMMON, bits, tensor

SCALARS = {"flag": True, "step": 3, "big": -(2**62), "rate": 0.1, "text": "é\n", "none": None}

NESTED = """
import torch
import torch.distributed.checkpoint as dcp
target = {
    "params": {"dense": {"kernel": torch.empty(2, 3)}, "layers": [torch.empty(2), torch.empty(1)]},
    "step": 0,
}
dcp.load(target, checkpoint_id=sys.argv[1], no_dist=True)
params = target["params"]
found = [show(params["dense"]["kernel"]), *map(show, params["layers"]), target["step"]]
"""


def leaves_of_every_kind() -> dict[str, np.ndarray]:
    arrays = {name: bits(name) for name in COMMON}
    return {**arrays, "zeros": np.zeros(5), "scalar": np.array(7, np.int64)}


def test_dcp_load_fills_a_nested_target(tmp_path):
    """A state dict of the same nesting is all that `dcp.load` needs, JAX arrays included."""
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    layers = [jnp.array([1.0, 2.0]), jnp.array([3.0])]
    tree = {"params": {"dense": {"kernel": jnp.array(kernel)}, "layers": layers}, "step": 5}
    checkpoint.save(tmp_path / "c", tree)
    expected = [kernel, np.array([1, 2], np.float32), np.array([3], np.float32)]
    assert read_with(NESTED, tmp_path / "c") == [*map(shown, expected), 5]


def test_dcp_reads_every_dtype_and_scalar(tmp_path):
    """`dcp.load` gives the bits of every dtype, 0-d and empty tensors and Python scalars."""
    arrays = {**leaves_of_every_kind(), "empty": np.zeros((0, 3), np.float32)}
    tensors = {name: tensor(array) for name, array in arrays.items()}
    checkpoint.save(tmp_path / "c", {"t": tensors, "s": SCALARS, "l": [torch.ones(1), 2]})
    assert read_with(DCP, tmp_path / "c") == {
        **{f"t.{name}": shown(array) for name, array in arrays.items()},
        **{f"s.{name}": value for name, value in SCALARS.items()},
        "l.0": shown(np.ones(1, np.float32)),
        "l.1": 2,
    }


def test_dcp_reads_a_tensordict(tmp_path):
    """A TensorDict is a nested dict to `dcp.load`, and the sidecar does not disturb it."""
    td = TensorDict(
        {"a": torch.arange(4), "sub": {"b": torch.zeros(4, 2)}, "why": NonTensorData("x")}, [4]
    )
    checkpoint.save(tmp_path / "c", td)
    assert (tmp_path / "c" / "tdbridge.json").exists()
    assert read_with(DCP, tmp_path / "c") == {
        "a": shown(np.arange(4)),
        "sub.b": shown(np.zeros((4, 2), np.float32)),
        "why": "x",
    }


def test_orbax_v1_and_v0_read_every_dtype_and_scalar(tmp_path):
    """Both generations of Orbax give the bits of every dtype, 64-bit ones without x64 too."""
    assert jnp.zeros(1, int).dtype == jnp.int32
    arrays = leaves_of_every_kind()
    tensors = {name: tensor(array) for name, array in arrays.items()}
    tree = {"t": TensorDict(tensors, []), "s": SCALARS, "l": [torch.ones(1), 2]}
    checkpoint.save(tmp_path / "c", tree, format="orbax")
    assert (tmp_path / "c" / "tdbridge.json").exists()
    expected = {
        "t": {name: shown(array) for name, array in arrays.items()},
        "s": SCALARS,
        "l": [shown(np.ones(1, np.float32)), 2],
    }
    assert read_with(ORBAX_V1, tmp_path / "c") == expected
    assert read_with(ORBAX_V0, tmp_path / "c") == expected
