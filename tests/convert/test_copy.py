"""`copy=True` never aliases, and `copy=False` never copies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdbridge import ArrayDict, explain, to_jax, to_torch
from tdbridge.convert.sharing import why_copied
from tests import zoo
from tests.convert.trees import address, aligned, listed, pairs, x64_for

# --- copy=True


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_copied_arraydict_keeps_its_values(name: str):
    """No leaf of to_jax(copy=True) lies in torch's memory: writes to the source do not reach it."""
    td = zoo.TREES[name]()
    with x64_for(name):
        ad = to_jax(td, copy=True)
    for _, tensor, array in pairs(td, ad):
        assert tensor.numel() == 0 or address(tensor) != address(array)
        if tensor.numel() and not tensor.is_conj() and not tensor.is_neg():
            tensor.untyped_storage().fill_(0)
    for path, values in zoo.expected(name).items():
        assert zoo.same_bits(np.asarray(ad[path]), values)


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_copied_tensordict_keeps_its_values(name: str):
    """No leaf of to_torch(copy=True) lies in JAX's memory: writes go neither way."""
    with x64_for(name):
        ad = to_jax(zoo.TREES[name](), copy=True)
    td = to_torch(ad, copy=True)
    for _, tensor, array in pairs(td, ad):
        assert tensor.numel() == 0 or address(tensor) != address(array)
        tensor.zero_()
    for path, values in zoo.expected(name).items():
        assert zoo.same_bits(np.asarray(ad[path]), values)


@pytest.mark.parametrize("to", [to_jax, to_torch])
@pytest.mark.parametrize("dtype", ["float32", "int64", ">f4", "bool"])
def test_a_copied_numpy_array_keeps_its_values(to: Callable[..., Any], dtype: str):
    """A numpy leaf that was copied does not see what is written to it later."""
    array = aligned((np.arange(32) % 2).astype(dtype))
    got = to({"x": array}, copy=True)["x"]
    array[:] = 1
    assert np.asarray(got).tolist() == [0, 1] * 16


@pytest.mark.parametrize("narrow", ["exact", "allow"])
def test_a_narrowed_leaf_is_a_copy(narrow: Any):
    """A 64-bit leaf that became 32-bit does not see what is written to it later."""
    tensor = torch.arange(16)
    array = to_jax(tensor, narrow=narrow)
    tensor.zero_()
    assert array.tolist() == list(range(16))


def test_a_leaf_that_had_to_be_copied_keeps_its_values():
    """With copy=None too, a leaf that `why_copied` gives a reason for is a real copy."""
    td, expected = zoo.strided(), zoo.expected("strided")
    copied = {
        path: array
        for path, tensor, array in pairs(td, to_jax(td))
        if why_copied(tensor) is not None
    }
    for leaf in ("transposed", "channels_last", "columns", "step", "expanded", "unaligned"):
        td[leaf].untyped_storage().fill_(0)
    td["conj"].zero_()
    td["neg"].zero_()
    assert len(copied) == 8
    for path, array in copied.items():
        assert zoo.same_bits(np.asarray(array), expected[path])


def test_a_write_right_after_dispatch_does_not_reach_a_copy():
    """JAX computes in the background: what torch writes meanwhile does not reach a copy."""
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: y @ x, x))
    for _ in range(5):
        tensor = torch.eye(300)
        result = program(to_jax(tensor, copy=True))
        tensor.zero_()
        assert np.array_equal(np.asarray(result), np.eye(300, dtype=np.float32))


ROWS = jax.NamedSharding(
    jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("x")
)
PLACES = [{}, {"device": "cpu"}, {"device": jax.devices("cpu")[2]}, {"sharding": ROWS}]


@pytest.mark.parametrize("place", PLACES, ids=["here", "cpu", "other_device", "sharded"])
def test_a_copy_that_is_placed_keeps_its_values(place: dict[str, Any]):
    """`device=` and `sharding=` with copy=True give arrays that a later write does not reach."""
    for _ in range(5):
        tensor = torch.arange(2.0**18)
        array = to_jax(tensor, copy=True, **place)
        tensor.zero_()
        assert np.array_equal(np.asarray(array), np.arange(2**18, dtype=np.float32))


@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("place", PLACES, ids=["here", "cpu", "other_device", "sharded"])
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donation_leaves_the_memory_of_torch_alone(place: dict[str, Any], copy: bool | None):
    """XLA does not write its result into the memory of a tensor whose array was donated to it."""
    program = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    for _ in range(5):
        tensor = torch.arange(2.0**16)
        result = program(to_jax(tensor, copy=copy, **place)).block_until_ready()
        assert torch.equal(tensor, torch.arange(2.0**16))
        assert np.array_equal(np.asarray(result), np.arange(2**16, dtype=np.float32) + 1)


@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donation_leaves_a_tensor_over_the_array_alone(copy: bool | None):
    """A tensor that to_torch made keeps its values when the array behind it is donated."""
    program = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    for _ in range(10):
        array = jnp.arange(2.0**16) * 1.0
        tensor = to_torch(array, copy=copy)
        program(array).block_until_ready()
        assert torch.equal(tensor, torch.arange(2.0**16))


def test_a_tensor_over_what_was_read_only_can_be_written_to(tmp_path: Path):
    """A file mapped for reading is copied: a write to the tensor of its array ends no process."""
    np.arange(64, dtype=np.float32).tofile(tmp_path / "data")
    mapped = np.memmap(tmp_path / "data", np.float32, "r")
    assert explain([mapped], to="jax").rows[0].reason == "it is read-only"
    tensor = to_torch(to_jax([mapped]), copy=False)[0]
    tensor.zero_()
    assert mapped.tolist() == list(range(64))


# --- copy=False


def mixed() -> TensorDict:
    """A leaf for each reason there is to copy one, and three that are shared."""
    raw = torch.zeros(64)
    return TensorDict(
        {
            "shared": raw,
            "empty": raw[1:1],
            "n": {"wide": torch.arange(3), "ok": raw[16:], "off": raw[1:]},
            "gaps": raw[::2],
            "rows": raw.view(8, 8).t(),
            "conj": torch.zeros(2, dtype=torch.complex64).conj(),
            "neg": torch.zeros(2, dtype=torch.complex64).conj().imag,
        }
    )


def test_copy_false_lists_each_leaf_that_would_be_copied():
    """The error names every such leaf with its reason, and no other leaf."""
    with pytest.raises(ValueError, match="copy=False, but") as error:
        to_jax({"td": mixed(), "list": [torch.zeros(9)[4:], torch.zeros(3)]}, copy=False)
    found = listed(error.value)
    assert found == {
        "['td', 'n', 'wide']": "int64 becomes int32 while x64 is off.",
        "['td', 'n', 'off']": "it starts 4 bytes past a multiple of 64.",
        "['td', 'gaps']": found["['td', 'gaps']"],
        "['td', 'rows']": found["['td', 'rows']"],
        "['td', 'conj']": "its conjugate bit has to be resolved.",
        "['td', 'neg']": "its negative bit has to be resolved.",
        "['list', '0']": "it starts 16 bytes past a multiple of 64.",
    }
    assert found["['td', 'gaps']"].startswith("its strides (2,) ")
    assert found["['td', 'rows']"].startswith("its strides (1, 8) ")
    assert "copy=None" in str(error.value)


@pytest.mark.parametrize("name", zoo.TREES)
def test_copy_false_converts_or_raises_but_never_copies(name: str):
    """Over the zoo, copy=False gives shared memory alone, or lists exactly the other leaves."""
    td = zoo.TREES[name]()
    reasons = {}
    with x64_for(name):
        for path, tensor in zoo.leaves(td).items():
            if (why := why_copied(tensor)) is not None:
                reasons[repr(list(path))] = f"{why}."
        if reasons:
            with pytest.raises(ValueError, match="copy=False, but") as error:
                to_jax(td, copy=False)
            assert listed(error.value) == reasons
        else:
            for _, tensor, array in pairs(td, to_jax(td, copy=False)):
                assert tensor.numel() == 0 or address(tensor) == address(array)


def test_copy_false_of_a_split_array_names_it():
    """An array over several devices has no one memory; a replicated one beside it is not named."""
    mesh = ROWS.mesh
    split = jax.device_put(jnp.zeros((8, 2)), ROWS)
    whole = jax.device_put(jnp.zeros((8, 2)), jax.NamedSharding(mesh, jax.P()))
    tree = {"ad": ArrayDict({"split": split, "whole": whole}, [8]), "one": jnp.zeros(2)}
    with pytest.raises(ValueError, match="copy=False, but") as error:
        to_torch(tree, copy=False)
    assert listed(error.value) == {"['ad', 'split']": "it is split over 8 devices."}
    assert "copy=None" in str(error.value)
    assert "consolidate" not in str(error.value)


def numpy_copies() -> dict[str, np.ndarray]:
    base = aligned(np.arange(64, dtype=np.float32))
    read_only = aligned(np.arange(64, dtype=np.float32))
    read_only.flags.writeable = False
    half = aligned(np.arange(64).astype(jnp.bfloat16)).reshape(8, 8)
    return {
        "foreign": base.astype(">f4"),
        "backwards": base[::-1],
        "gaps": half[:, ::2],
        "read_only": read_only,
        "unaligned": base[1:],
        "wide": aligned(np.arange(8)),
    }


@pytest.mark.parametrize("name", numpy_copies())
def test_copy_false_of_a_numpy_array_that_jax_cannot_share_names_it(name: str):
    """A numpy leaf that would have to be copied first is named, wherever the copy would lie."""
    kept = []  # a copy may start on a multiple of 64 by chance: try several places
    for _ in range(8):
        with pytest.raises(ValueError, match="copy=False, but") as error:
            to_jax({"ok": torch.zeros(2), "x": numpy_copies()[name]}, copy=False)
        assert list(listed(error.value)) == ["['x']"]
        kept.append(error)


def test_the_advice_of_a_copy_error_helps():
    """Narrowed leaves are told of x64: no alignment would help them."""
    with pytest.raises(ValueError, match="copy=False, but") as error:
        to_jax({"x": torch.arange(3)}, copy=False)
    assert "x64" in str(error.value).splitlines()[-1]
