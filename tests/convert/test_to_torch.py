"""to_torch: which trees it takes, and what becomes of their nodes and leaves."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch
from tensordict import TensorDict

from tdbridge import ArrayDict, to_torch
from tests import zoo
from tests.convert.trees import address, aligned


def test_an_arraydict_becomes_a_tensordict():
    """Keys, values, batch size and names are those of the ArrayDict, at every depth."""
    source = {"x": jnp.arange(6.0).reshape(2, 3), "n": {"y": jnp.arange(2, dtype=jnp.int8)}}
    td = to_torch(ArrayDict(source, [2], names=["time"]))
    assert type(td) is TensorDict
    assert set(td.keys(True, True)) == {"x", ("n", "y")}
    assert torch.equal(td["x"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(td["n", "y"], torch.arange(2, dtype=torch.int8))
    assert td.batch_size == td["n"].batch_size == torch.Size([2])
    assert td.names == td["n"].names == ["time"]


def test_the_result_is_an_ordinary_tensordict():
    """The result can be written to, extended, indexed and stacked, as any TensorDict."""
    td = to_torch(ArrayDict({"x": jnp.zeros((2, 3))}, [2]), copy=True)
    td["new"] = torch.ones(2)
    td["x"] += 1
    assert not td.is_locked
    assert td[0]["x"].tolist() == [1, 1, 1]
    stacked: Any = torch.stack([td, td])
    assert stacked["new"].shape == (2, 2)


def test_any_pytree_keeps_its_shape():
    """Containers and leaves that are no arrays stay; every array becomes a tensor."""
    state: Any = optax.adam(1e-3).init({"w": jnp.ones(3)})
    tree = {"state": state, "l": [jnp.ones(2), None, 3, "s", (np.ones(2), 2.5)], "e": {}}
    got = to_torch(tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert type(got["state"][0]) is type(state[0])
    assert got["l"][1:4] == [None, 3, "s"]
    assert got["l"][4][1] == 2.5
    arrays = [leaf for leaf in jax.tree.leaves(got) if not isinstance(leaf, (int, float, str))]
    assert len(arrays) == 5
    assert all(isinstance(leaf, torch.Tensor) for leaf in arrays)


def test_what_is_no_array_is_left_untouched():
    """Scalars, strings, specs and loose tensors are the same objects afterwards."""
    for leaf in (None, 7, "text", jax.ShapeDtypeStruct((2,), jnp.float32), torch.ones(2)):
        assert to_torch(leaf) is leaf
        assert to_torch([leaf])[0] is leaf


def test_a_tensordict_of_tensors_keeps_its_device():
    """What is torch's already is not changed: a TensorDict keeps the device that it declares."""
    td = TensorDict({"x": torch.ones(2)}, [2], device="cpu")
    got = to_torch({"td": td, "a": jnp.ones(2)})["td"]
    assert got.device == torch.device("cpu")
    assert got["x"] is td["x"]


def test_a_tensordict_that_holds_jax_arrays_becomes_one_of_tensors():
    """A TensorDict over jax arrays, as jax.tree.map makes it, is converted leaf by leaf."""
    td = jax.tree.map(lambda leaf: jnp.asarray(leaf.numpy()) + 1, zoo.no_batch())
    got = to_torch(td)
    assert type(got) is TensorDict
    assert torch.equal(got["w"], zoo.no_batch()["w"] + 1)
    assert int(got["step"]) == 8


def test_a_numpy_scalar_in_an_arraydict_becomes_a_tensor():
    """A numpy scalar is an array of no dimensions and keeps its value and dtype."""
    td = to_torch(ArrayDict({"x": np.float32(3.5)}))
    assert torch.equal(td["x"], torch.tensor(3.5))


def test_it_waits_for_the_computation():
    """A tensor over an array that is still being computed holds the computed values."""

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 200, lambda _, y: y @ x, x)

    x = jnp.eye(300)
    for _ in range(5):
        assert torch.equal(to_torch(slow(x)), torch.eye(300))


def test_a_write_to_the_tensor_changes_the_array():
    """The tensor is writable and its memory is the array's, as the documentation warns."""
    array = jnp.zeros(16)
    to_torch(array, copy=False)[3] = 7
    assert np.asarray(array)[3] == 7


@pytest.mark.parametrize("x64", [False, True])
def test_64_bit_arrays_keep_their_dtype(x64: bool):
    """An int64 array is an int64 tensor whether x64 is on at the time or not."""
    with jax.enable_x64(True):
        array = jnp.array([2**40 + 5, -(2**40)])
    with jax.enable_x64(x64):
        tensor = to_torch(array, copy=False)
    assert tensor.dtype == torch.int64
    assert tensor.tolist() == [2**40 + 5, -(2**40)]


def numpy_leaves() -> dict[str, tuple[np.ndarray, bool]]:
    """Arrays that numpy allows, and whether torch can share them."""
    base = aligned(np.arange(24, dtype=np.float32).reshape(4, 6))
    read_only = base.copy()
    read_only.flags.writeable = False
    fields = np.zeros(4, [("a", "f4"), ("b", "i1")])
    fields["a"] = [1, 2, 3, 4]
    half = np.arange(16).astype(ml_dtypes.bfloat16).reshape(4, 4)
    return {
        "plain": (base, True),
        "column_slice": (base[:, 1:3], True),
        "step_slice": (base[::2], True),
        "transposed": (base.T, True),
        "zero_dims": (np.array(2.5, np.float32), True),
        "zero_size": (np.zeros((2, 0), np.float32), True),
        "longlong": (np.arange(3, dtype=np.longlong), True),
        "ulonglong": (np.arange(3, dtype=np.ulonglong), True),
        "bfloat16": (half, True),
        "negative_strides": (base[::-1, ::-1], False),
        "foreign_order": (base.astype(">f4"), False),
        "foreign_int": ((np.arange(5) + 2**40).astype(">i8"), False),
        "read_only": (read_only, False),
        "broadcast": (np.broadcast_to(base[0], (3, 6)), False),
        "field_of_a_record": (fields["a"], False),
        "bfloat16_columns": (half[:, ::2], True),
        "bfloat16_reversed": (half[::-1], False),
    }


@pytest.mark.parametrize("name", numpy_leaves())
def test_numpy_arrays_of_every_stride_and_order_keep_their_values(name: str):
    """A numpy array becomes a tensor of the same values, in native byte order."""
    array, _ = numpy_leaves()[name]
    tensor = to_torch({"x": array})["x"]
    native = array.astype(array.dtype.newbyteorder("=")).reshape(array.shape)
    got = zoo.as_numpy(tensor)
    assert got.dtype == native.dtype
    assert got.shape == array.shape
    assert got.tobytes() == native.tobytes()


@pytest.mark.parametrize("name", numpy_leaves())
def test_numpy_arrays_are_shared_or_refused_by_copy_false(name: str):
    """copy=False gives the memory of a numpy array, or names the array: never a silent copy."""
    array, shared = numpy_leaves()[name]
    if shared:
        tensor = to_torch({"x": array}, copy=False)["x"]
        assert array.size == 0 or address(tensor) == array.ctypes.data
    else:
        with pytest.raises(ValueError, match=r"\['x'\]: "):
            to_torch({"x": array}, copy=False)


def test_device_moves_the_tensors():
    """`device` is where the tensors are; shapes and dtypes stay."""
    got = to_torch(ArrayDict({"x": jnp.ones((2, 3), jnp.bfloat16)}, [2]), device="meta")
    assert got["x"].device.type == "meta"
    assert got["x"].shape == (2, 3)
    assert got["x"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"copy": "yes"}, "copy is None, True or False, got 'yes'."),
        ({"copy": 0}, "copy is None, True or False, got 0."),
        ({"copy": 1}, "copy is None, True or False, got 1."),
        ({"copy": False, "device": "cpu"}, "copy=False shares memory where it is"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str):
    """An argument outside of its values raises ValueError, also for an empty tree."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
        to_torch({}, **arguments)
    assert message in str(error.value)
