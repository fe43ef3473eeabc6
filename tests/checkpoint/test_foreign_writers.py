"""What torch and Orbax wrote with their own code is read, with no target and no sidecar."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.distributed.checkpoint.state_dict_saver import save

import tdbridge.checkpoint as checkpoint
from tests.checkpoint.trees import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ORBAX = """
import sys
import jax, jax.numpy as jnp, numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import v1
from pathlib import Path
jax.config.update("jax_enable_x64", True)
root = Path(sys.argv[1])
tree = {"w": jnp.array([[0.1, -0.0]]), "n": {"i": jnp.array([2**40])}}
tree["b"] = jnp.ones(3, jnp.bfloat16)
tree["l"] = [np.arange(3), np.zeros((2, 2))]
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(root / "v0", tree)
with ocp.CheckpointManager(root / "run") as manager:
    manager.save(5, args=ocp.args.StandardSave(tree))
v1.save(root / "v1", {**tree, "s": "text"})
assert "tdbridge" not in sys.modules
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Checkpoints of Orbax, written with x64 in a process of its own."""
    root = tmp_path_factory.mktemp("orbax")
    done = subprocess.run(
        [sys.executable, "-c", ORBAX, str(root)],
        check=False,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize("place", ["v0", "run/5", "run/5/default", "v1", "v1/state"])
def test_orbax_checkpoints_keep_64_bits(written, place):
    """JAX arrays saved with x64 come back with all their bits, in every layout of Orbax."""
    found = checkpoint.load(written / place, to="numpy")
    assert same_bits(found["w"], np.array([[0.1, -0.0]]))
    assert same_bits(found["n"]["i"], np.array([2**40]))
    assert found["b"].tolist() == [1, 1, 1]
    assert found["b"].dtype.name == "bfloat16"
    first, second = found["l"]
    assert same_bits(first, np.arange(3))
    assert same_bits(second, np.zeros((2, 2)))
    assert found.get("s", "text") == "text"


def test_a_torch_training_state_is_read(tmp_path):
    """Model and optimizer as torch saves them: int keys are strings, tuples stay tuples."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.5, 0.75))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}
    save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    found = checkpoint.load(tmp_path / "c", to="numpy")
    assert same_bits(found["model"]["weight"], model.weight.detach().numpy())
    moment = optimizer.state[model.weight]["exp_avg"]
    assert same_bits(found["optim"]["state"]["0"]["exp_avg"], moment.numpy())
    (group,) = found["optim"]["param_groups"]
    assert (group["lr"], group["betas"], group["params"]) == (0.1, (0.5, 0.75), [0, 1])
    assert found["epoch"] == 3


def test_a_dict_of_tensors_becomes_a_tensordict(tmp_path):
    """Without a sidecar, nested dicts are TensorDicts without batch dimensions."""
    save({"a": {"b": torch.ones(2)}, "n": 1}, checkpoint_id=tmp_path / "c", no_dist=True)
    found = checkpoint.load(tmp_path / "c")
    assert type(found) is TensorDict
    assert found.batch_size == torch.Size([])
    assert found["a", "b"].tolist() == [1, 1]
    assert found["n"] == 1


def test_a_tensordict_that_torch_saved_is_read(tmp_path):
    """torch saves a TensorDict under a key with dotted names; they are the keys that come back."""
    td = TensorDict({"x": torch.ones(2), "n": {"y": torch.zeros(2)}}, [2])
    save({"td": td}, checkpoint_id=tmp_path / "c", no_dist=True)
    found = checkpoint.load(tmp_path / "c", to="numpy")
    assert sorted(found["td"]) == ["n.y", "x"]
