"""`to_torch(like=)`: the dtypes of another tree, where no value changes by it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdbridge import ArrayDict, CopyError, LayoutError, LeafTypeError, explain, to_jax, to_torch
from tests import zoo
from tests.convert.trees import address, aligned, extremes, listed

RIGHT = [name for name in zoo.BOTH if not name.startswith("float8")]


def wide() -> TensorDict:
    return TensorDict(
        {
            "i": torch.tensor([[-(2**31), 2**31 - 1], [0, 1]]),
            "n": {"u": torch.tensor([2**32 - 1, 7], dtype=torch.uint64), "x": torch.ones(2)},
            "t": torch.arange(6).view(3, 2).t(),
            "label": "text",
        },
        [2],
        names=["time"],
    )


@pytest.mark.parametrize("form", ["tensordict", "arraydict", "dict", "shapes", "meta"])
def test_what_was_narrowed_comes_back(form: str):
    """The dtypes of `like` are restored, values, classes and names kept, whatever `like` is."""
    td = wide()
    with jax.enable_x64(True):
        forms: dict[str, Any] = {
            "tensordict": td,
            "arraydict": to_jax(td),
            "dict": {"n": {"x": np.float32(0), "u": np.uint64(0)}, "i": np.int64(0), "t": td["t"]},
            "shapes": jax.eval_shape(lambda: to_jax(td)),
            "meta": td.to("meta"),
        }
    back = to_torch(to_jax(td), like=forms[form])
    for path, tensor in zoo.leaves(td).items():
        assert back[path].dtype == tensor.dtype
        assert torch.equal(back[path], tensor)
    assert (back.names, back.batch_size, back["label"]) == (["time"], (2,), "text")


def test_another_batch_size_is_no_other_structure():
    """Shapes are not compared: a batch of another size comes back in the same dtypes."""
    back = to_torch(to_jax(wide()[:1]), like=wide())
    assert back.batch_size == (1,)
    assert back["n", "u"].tolist() == [2**32 - 1]
    assert back["n", "u"].dtype == torch.uint64


def test_a_leaf_of_the_right_dtype_is_shared_and_a_widened_one_is_not():
    """What needs no cast keeps its memory; a cast leaf does not reach JAX's memory."""
    arrays = {"x": jnp.ones(16), "i": jnp.arange(16)}
    got = to_torch(arrays, like={"x": torch.ones(1), "i": torch.arange(1)})
    assert address(got["x"]) == address(arrays["x"])
    got["i"].zero_()
    assert arrays["i"].tolist() == list(range(16))
    copied = to_torch(arrays, like=got, copy=True)
    assert address(copied["x"]) != address(arrays["x"])
    assert to_torch(arrays, like=arrays, copy=False)["i"].data_ptr() == address(arrays["i"])


def test_every_kind_of_array_is_widened():
    """Split arrays, numpy arrays in a foreign byte order and read-only ones widen exactly."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    read_only = aligned(np.arange(8, dtype=np.int16))
    read_only.flags.writeable = False
    tree = {
        "split": jax.device_put(jnp.arange(8), jax.NamedSharding(mesh, jax.P("x"))),
        "foreign": np.arange(8).astype(">i4"),
        "read_only": read_only,
        "tensor": torch.arange(8, dtype=torch.int32),
        "scalar": 3,
    }
    got = to_torch(tree, like={name: torch.arange(8) for name in tree})
    for name in ("split", "foreign", "read_only"):
        assert torch.equal(got[name], torch.arange(8))
    assert got["tensor"] is tree["tensor"]
    assert got["scalar"] == 3


def numpy_cast(values: np.ndarray, name: str) -> Any:
    with np.errstate(all="ignore"):  # it warns of signalling NaN
        return values.astype(zoo.numpy_dtype(name))


def same_values(values: np.ndarray, cast: Any) -> bool:
    """Whether two arrays hold the same numbers, the signs of zeros included."""
    if cast.dtype.kind == "c":
        return same_values(values, cast.real) and not cast.imag.any()
    one, other = numpy_cast(values, "float64"), numpy_cast(cast, "float64")
    return np.array_equal(one, other, equal_nan=True) and np.array_equal(
        np.signbit(one[~np.isnan(one)]), np.signbit(other[~np.isnan(other)])
    )


def assert_cast_exactly_where_numpy_is_exact(name: str) -> None:
    values = extremes(name)
    if values.dtype.kind in "iu" and values.itemsize == 2:
        values = np.arange(2**16, dtype=np.uint16).view(values.dtype)
    for other in RIGHT:
        like = torch.empty(0, dtype=getattr(torch, other))
        if name == other or same_values(values, numpy_cast(values, other)):
            got = zoo.as_numpy(to_torch(values, like=like))
            assert got.dtype.name == other
            assert name == other or same_values(values, got), other
        else:
            with pytest.raises(LeafTypeError, match=f"got {name}, and in `like` {other}"):
                to_torch(values, like=like)


def test_a_cast_is_made_if_and_only_if_every_value_survives_it():
    """For each dtype of 16 bits or fewer: all its values, cast by numpy, are the oracle."""
    for name in zoo.BOTH:
        if zoo.numpy_dtype(name).itemsize <= 2:
            assert_cast_exactly_where_numpy_is_exact(name)


WIDENED = [
    ("int32", "int64"), ("uint32", "uint64"), ("uint32", "int64"), ("float32", "float64"),
    ("complex64", "complex128"), ("float32", "complex64"), ("int32", "float64"),
]  # fmt: skip
REFUSED = [
    ("int32", "float32"), ("int32", "uint64"), ("uint32", "int32"), ("int64", "float64"),
    ("uint64", "int64"), ("uint64", "float64"), ("float32", "bfloat16"), ("float64", "float32"),
    ("float64", "complex64"), ("complex64", "float64"), ("float32", "int64"), ("int32", "bool"),
    ("bool", "float8_e8m0fnu"), ("float8_e5m2", "float8_e5m2fnuz"),
]  # fmt: skip


def test_wide_casts_that_change_no_value_give_what_numpys_give():
    """The widened extremes of a dtype are those that numpy's own cast gives."""
    for name, other in WIDENED:
        values = extremes(name)
        got = to_torch([values], like=[torch.empty(0, dtype=getattr(torch, other))])[0]
        assert np.array_equal(got.numpy(), numpy_cast(values, other), equal_nan=True)


def test_one_error_lists_every_cast_that_could_change_a_value():
    """Each such leaf is named with both dtypes, beside those that cannot be carried at all."""
    with jax.enable_x64(True):
        tree: dict[str, Any] = {f"{a} {b}": jnp.zeros(2, a) for a, b in REFUSED}
    like: dict[str, Any] = {f"{a} {b}": torch.zeros(2).to(getattr(torch, b)) for a, b in REFUSED}
    tree |= {"ok": jnp.arange(2), "key": jax.random.key(0), "one": jnp.ones(2), "j": jnp.ones(2)}
    like |= {"ok": torch.arange(2), "key": torch.ones(2), "one": 1, "j": jnp.ones(2, jnp.int4)}
    with pytest.raises(LeafTypeError, match="to_torch cannot carry") as error:
        to_torch(tree, like=like)
    found = listed(error.value)
    assert (
        found.pop("['one']")
        == "got float32, and in `like` a int, which has no dtype: pass a tensor or an array."
    )
    assert found.pop("['j']") == (
        "got float32, and in `like` dtype int4, which torch does not have."
    )
    assert set(found) == {f"['{a} {b}']" for a, b in REFUSED}


def test_one_array_at_two_paths_gets_the_dtype_of_each():
    """One array that stands at several paths is one tensor for each dtype that `like` has there."""
    array = jnp.arange(3, dtype="int16")
    like = {"a": torch.int64, "b": torch.int32, "c": torch.int64}
    got = to_torch(
        dict.fromkeys(like, array), like={k: torch.ones(1).to(d) for k, d in like.items()}
    )
    assert {key: tensor.dtype for key, tensor in got.items()} == like
    assert got["a"] is got["c"]
    with pytest.raises(LeafTypeError) as error:
        to_torch({"a": array, "b": array}, like={"a": np.ones(1, "i8"), "b": np.ones(1, "i1")})
    assert set(listed(error.value)) == {"['b']"}


def test_keys_come_back_whatever_like_holds_in_their_place():
    """PRNG keys take no dtype from `like`, which may hold them as torch or as JAX does."""
    td = TensorDict({"key": to_torch(jax.random.key(3)), "n": torch.arange(2)})
    for like in (td, {"key": jax.random.key(0), "n": torch.arange(2)}):
        got = to_torch(to_jax(td), like=like)
        assert got["n"].dtype == torch.int64
        assert got.get("key").key_data.tolist() == [0, 3]


def test_another_structure_is_refused_by_paths():
    """Paths that `like` lacks, and those that only it has, are listed, and nothing else."""
    tree = {"a": jnp.ones(2), "l": [jnp.ones(2), 3], "n": ArrayDict({"b": jnp.ones(2)}, [2])}
    like = {"a": torch.ones(2), "l": [torch.ones(2)], "n": {"c": torch.ones(2)}}
    with pytest.raises(LayoutError, match="`like` does not have the structure") as error:
        to_torch(tree, like=like)
    assert listed(error.value) == {
        "['l', '1']": "not in `like`.",
        "['n', 'b']": "not in `like`.",
        "['n', 'c']": "in `like`, and no leaf of the tree.",
    }
    with pytest.raises(LayoutError):
        explain(tree, to="torch", like=like)


def test_a_cast_is_a_copy_to_copy_false_and_to_explain():
    """copy=False names each leaf that would be cast; explain gives the same reason."""
    tree, like = {"x": jnp.ones(2), "i": jnp.arange(2)}, {"x": np.ones(2, "f4"), "i": np.arange(2)}
    reason = "int32 becomes int64, as in `like`"
    with pytest.raises(CopyError) as error:
        to_torch(tree, like=like, copy=False)
    assert listed(error.value) == {"['i']": f"{reason}."}
    rows = explain(tree, to="torch", like=like).rows
    assert {row.path: (row.fate, row.reason) for row in rows} == {
        ("x",): ("shared", ""),
        ("i",): ("copied", reason),
    }
    rows = explain(tree, to="torch", like={**like, "x": torch.ones(2).half()}).rows
    assert {row.path: row.fate for row in rows} == {("x",): "refused", ("i",): "copied"}
    with pytest.raises(ValueError, match="`like` is an argument of to_torch"):
        explain(tree, to="jax", like=like)
