"""64-bit leaves: narrowed exactly or refused while x64 is off, shared while it is on."""

import math
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given

from tdbridge import NarrowingError, to_jax, to_torch
from tdbridge.convert.copies import BUFFER, SMALL, shareable
from tests import zoo
from tests.convert.trees import address, extremes, listed, tensor_of

ROOM = {"int64": (-(2**31), 2**31 - 1), "uint64": (0, 2**32 - 1)}
INTEGERS = [
    ("int64", 2**31 - 1), ("int64", 2**31), ("int64", -(2**31)), ("int64", -(2**31) - 1),
    ("int64", 2**40 + 5), ("int64", 2**63 - 1), ("int64", -(2**63)), ("int64", 0),
    ("uint64", 2**31), ("uint64", 2**32 - 1), ("uint64", 2**32), ("uint64", 2**63 - 1),
    ("uint64", 2**63), ("uint64", 2**64 - 1), ("uint64", 0),
]  # fmt: skip


def integers(name: str, *values: int) -> torch.Tensor:
    return tensor_of(np.array(values, name))


@pytest.mark.parametrize("narrow", ["exact", "allow"])
@pytest.mark.parametrize(("name", "value"), INTEGERS)
def test_an_integer_is_narrowed_only_when_it_fits(name: str, value: int, narrow: Any):
    """An integer crosses as 32 bits when every value fits, else it is refused: it never wraps."""
    low, high = ROOM[name]
    tensor = integers(name, 1, value, 2)
    if low <= value <= high:
        array = to_jax({"x": tensor}, narrow=narrow)["x"]
        assert array.dtype == name.replace("64", "32")
        assert array.tolist() == [1, value, 2]
    else:
        with pytest.raises(NarrowingError) as error:
            to_jax({"x": tensor}, narrow=narrow)
        values = sorted((1, 2, value))
        assert listed(error.value) == {
            "['x']": f"got {name} with values from {values[0]} to {values[-1]}, "
            "which do not fit in 32 bits."
        }


@given(values=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), step=st.integers(1, 2))
def test_any_integers_are_kept_or_refused(values: list[int], step: int):
    """Whatever the integers and strides, the array equals the tensor or there is an error."""
    tensor = torch.tensor(values, dtype=torch.int64)[::step]
    if all(-(2**31) <= value < 2**31 for value in values[::step]):
        assert to_jax(tensor).tolist() == values[::step]
    else:
        with pytest.raises(NarrowingError):
            to_jax(tensor)


@pytest.mark.parametrize("narrow", ["exact", "allow"])
@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_integers_of_any_shape_are_narrowed(shape: tuple[int, ...], narrow: Any):
    """A 64-bit leaf of no elements or of no dimensions becomes a 32-bit one of the same shape."""
    for name in ROOM:
        array = to_jax(tensor_of(np.zeros(shape, name)), narrow=narrow)
        assert array.shape == shape
        assert array.dtype == name.replace("64", "32")


WIDE: dict[str, list[complex]] = {"float64": [1.0, 0.1], "complex128": [1 + 1j]}


@pytest.mark.parametrize("name", WIDE)
def test_a_64_bit_float_is_refused(name: str):
    """float64 and complex128 are refused by default, also where this value would survive."""
    for values in (WIDE[name], [1.0], []):
        with pytest.raises(NarrowingError) as error:
            to_jax({"x": tensor_of(np.array(values, name))})
        assert listed(error.value) == {"['x']": f"got {name}, which would be rounded."}


def test_allow_rounds_floats_to_the_nearest():
    """narrow="allow" casts as IEEE rounding does: numpy's cast is the oracle."""
    values = np.array([0.1, 1 / 3, -0.0, 1e-46, 2**24 + 1, math.inf, -math.inf])
    assert to_jax(torch.from_numpy(values), narrow="allow").tobytes() == (
        values.astype(np.float32).tobytes()
    )
    assert jnp.isnan(to_jax(torch.tensor([math.nan], dtype=torch.float64), narrow="allow"))[0]
    z: Any = np.array([0.1 + 0.2j, -1 - 1e-50j])
    array = to_jax({"z": torch.from_numpy(z), "c": torch.from_numpy(z).conj()}, narrow="allow")
    assert np.asarray(array["z"]).tobytes() == z.astype(np.complex64).tobytes()
    assert np.array_equal(np.asarray(array["c"]), z.conj().astype(np.complex64))
    imag = to_jax(torch.from_numpy(z).conj().imag, narrow="allow")
    assert np.array_equal(np.asarray(imag), (-z.imag).astype(np.float32))


@pytest.mark.parametrize("name", [*ROOM, *WIDE])
def test_never_refuses_every_64_bit_leaf(name: str):
    """narrow="never" refuses each 64-bit leaf, also one without elements."""
    for count in (0, 3):
        with pytest.raises(NarrowingError) as error:
            to_jax({"x": tensor_of(np.zeros(count, name))}, narrow="never")
        assert listed(error.value) == {"['x']": f'got {name}, and narrow="never".'}
    small = to_jax({"x": torch.ones(2)}, narrow="never")
    assert small["x"].dtype == "float32"


def many_leaves(name: str) -> dict[str, torch.Tensor]:
    """Small leaves of every form, enough of them for several buffers, around large ones."""
    values = np.resize(extremes(name), 4096) if name in WIDE else np.arange(4096).astype(name)
    base = tensor_of(values)
    small = {
        "rows": base[:12].view(3, 4),
        "columns": base[:12].view(4, 3).t(),
        "step": base[1:90:7],
        "scalar": base[5],
        "empty": base[:0].view(2, 0),
        "expanded": base[3].expand(5),
        "off": base[1:9],
    }
    if name == "complex128":
        small |= {"conj": base[:9].conj(), "neg": base[:9].conj().imag}
    tree = {f"{key}{i}": leaf for i in range(500) for key, leaf in small.items()}
    return {"large": base, "columns": base.view(64, 64).t(), **tree, "last": base[:2000]}


SHORT = {
    torch.int64: torch.int32,
    torch.uint64: torch.uint32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
}


@pytest.mark.parametrize("name", [*ROOM, *WIDE])
def test_many_leaves_are_narrowed_each_to_its_own_values(name: str):
    """Leaves of every form, small and large, have the bits of torch's own cast, and are aligned."""
    tree = many_leaves(name)
    for key, array in to_jax(tree, narrow="allow").items():
        wanted = tree[key].contiguous().to(SHORT[tree[key].dtype])
        assert zoo.same_bits(np.asarray(array), zoo.as_numpy(wanted)), key
        assert array.size == 0 or address(array) % 64 == 0, key


@pytest.mark.parametrize("narrow", ["exact", "allow"])
def test_each_of_many_leaves_that_does_not_fit_is_named(narrow: Any):
    """Where one value anywhere among many leaves does not fit, its leaf is named and no other."""
    tree: dict[str, Any] = many_leaves("int64")
    tree |= {"b": torch.tensor([1, 2**31]), "c": torch.arange(9000) - 2**31 - 1}
    tree |= {"u": integers("uint64", 2**32, 7), "v": integers("uint64", 2**32 - 1)}
    tree |= {f"z{i}": torch.arange(7) for i in range(500)} | {"zz": torch.tensor(-(2**63))}
    with pytest.raises(NarrowingError) as error:
        to_jax(tree, narrow=narrow)
    assert set(listed(error.value)) == {"['b']", "['c']", "['u']", "['zz']"}


@pytest.mark.parametrize("copy", [False, True])
def test_a_leaf_that_is_kept_keeps_little_else(copy: bool):
    """Copies share a buffer only while they are small, and no buffer is large."""
    leaves = [torch.arange(size) for size in (1, 100, 5000, 3) * 400]
    if copy:
        leaves = [leaf.int() for leaf in leaves]
    new = shareable(leaves, copy=copy)
    for leaf, tensor in zip(leaves, new, strict=True):
        assert torch.equal(leaf, tensor.long())
        limit = BUFFER if leaf.nbytes <= SMALL else tensor.nbytes + 63
        assert tensor.untyped_storage().nbytes() <= limit
    buffers = {tensor.untyped_storage().data_ptr() for tensor in new}
    assert len(buffers) < 400 + 10


def test_one_error_lists_every_leaf_and_the_three_remedies():
    """Each leaf that would lose values is named, no other is, and what to do is said."""
    tree = {
        "fits": torch.arange(3),
        "big": [torch.tensor([5, 2**40])],
        "n": {"f": torch.ones(2, dtype=torch.float64), "g": torch.ones(2)},
        "np": np.array([-(2**35)]),
    }
    with pytest.raises(NarrowingError, match="while x64 is off") as error:
        to_jax(tree)
    assert listed(error.value) == {
        "['big', '0']": "got int64 with values from 5 to 1099511627776, "
        "which do not fit in 32 bits.",
        "['n', 'f']": "got float64, which would be rounded.",
        "['np']": "got int64 with values from -34359738368 to -34359738368, "
        "which do not fit in 32 bits.",
    }
    advice = str(error.value).splitlines()[-1]
    assert 'jax.config.update("jax_enable_x64", True)' in advice
    assert "with jax.enable_x64(True):" in advice
    assert "cast the leaf in torch" in advice
    assert 'narrow="allow"' in advice


@pytest.mark.parametrize("narrow", ["exact", "allow", "never"])
def test_with_x64_every_leaf_is_shared_and_exact(narrow: Any):
    """With x64 on `narrow` has nothing to do: the same memory, the same dtype, no error."""
    tree = {
        "i": torch.tensor([2**63 - 1, -(2**63)]),
        "u": integers("uint64", 2**64 - 1, 0),
        "f": torch.tensor([1e300, 0.1], dtype=torch.float64),
        "c": torch.tensor([1e300 + 1e-300j], dtype=torch.complex128),
    }
    with jax.enable_x64(True):
        got = to_jax(tree, copy=False, narrow=narrow)
    for key, tensor in tree.items():
        assert address(got[key]) == address(tensor)
        assert str(got[key].dtype) == str(tensor.dtype).removeprefix("torch.")
        assert np.asarray(got[key]).tobytes() == tensor.numpy().tobytes()


def test_a_64_bit_array_keeps_its_dtype_outside_of_the_context():
    """An int64 array made under x64 stays int64 through jit, indexing, moves and to_torch."""
    with jax.enable_x64(True):
        array = to_jax(torch.tensor([2**40 + 5, 7]))
    assert array.dtype == "int64"
    assert array[0].dtype == "int64"
    assert jax.jit(lambda x: x)(array).tolist() == [2**40 + 5, 7]
    assert jax.device_put(array, jax.devices("cpu")[1]).tolist() == [2**40 + 5, 7]
    assert jnp.concatenate([array, array]).tolist() == [2**40 + 5, 7] * 2
    assert to_torch(array, copy=False).tolist() == [2**40 + 5, 7]


def test_x64_is_asked_for_at_each_call():
    """What one call found of x64, inside its context, is not remembered in the next."""
    tensor = torch.tensor([3])
    for _ in range(2):
        assert to_jax(tensor).dtype == "int32"
        with jax.enable_x64(True):
            assert to_jax(tensor).dtype == "int64"


def test_a_failed_conversion_changes_nothing():
    """The tensors of a refused tree can still be resized: nothing was exported."""
    good, bad = torch.zeros(4), torch.tensor([2**40])
    with pytest.raises(NarrowingError):
        to_jax({"good": good, "bad": bad})
    good.resize_(1000)
    assert good.shape == (1000,)
