"""What to_torch cannot carry is refused before anything is converted, every leaf with its path."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from tdbridge import ArrayDict, LeafTypeError, to_jax, to_torch
from tests.convert.trees import listed

JAX_ONLY = [
    "int2", "int4", "uint2", "uint4",
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float4_e2m1fn",
]  # fmt: skip


def deleted() -> jax.Array:
    array = jnp.ones(4)
    array.delete()
    return array


def deleted_key() -> jax.Array:
    key = jax.random.key(0)
    key.delete()
    return key


def donated() -> jax.Array:
    array = jnp.ones(4) * 1.0
    jax.jit(lambda x: x + 1.0, donate_argnums=0)(array)
    return array


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "deleted": (deleted, "an array that was deleted or donated"),
    "donated": (donated, "an array that was deleted or donated"),
    "deleted_key": (deleted_key, "an array that was deleted or donated"),
    "float0": (lambda: np.zeros(4, jax.dtypes.float0), "float0"),
    "object": (lambda: np.array([None, "a"]), "dtype object"),
    "text": (lambda: np.array(["a"]), "dtype <U1"),
    "time": (lambda: np.zeros(2, "M8[s]"), "dtype datetime64[s]"),
    "record": (lambda: np.zeros(2, [("a", "f4")]), "dtype [('a', '<f4')]"),
    "longdouble": (lambda: np.zeros(2, np.longdouble), "dtype float128"),
    "masked": (lambda: np.ma.masked_array([1.0], [True]), "MaskedArray"),
    **{name: (lambda name=name: jnp.ones(4, name), f"dtype {name}") for name in JAX_ONLY},
    **{
        f"numpy_{name}": (lambda name=name: np.ones(4, getattr(ml_dtypes, name)), f"dtype {name}")
        for name in JAX_ONLY
    },
}


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_leaf_that_cannot_be_carried_is_named(kind: str, copy: bool | None):
    """The error is a TypeError with the leaf's path, what was got, and what to do."""
    make, got = REFUSED[kind]
    with pytest.raises(LeafTypeError, match="to_torch cannot carry") as error:
        to_torch({"ok": jnp.ones(2), "bad": [make()]}, copy=copy)
    assert list(listed(error.value)) == ["['bad', '0']"]
    assert listed(error.value)["['bad', '0']"].startswith("got ")
    assert got in listed(error.value)["['bad', '0']"]


def test_one_error_lists_every_leaf():
    """All leaves of a tree that cannot be carried are listed, each with its path, and no other."""
    tree = {kind: [make(), jnp.ones(1)] for kind, (make, _) in REFUSED.items()}
    with pytest.raises(LeafTypeError) as error:
        to_torch(tree)
    assert sorted(listed(error.value)) == sorted(f"['{kind}', '0']" for kind in REFUSED)


@pytest.mark.parametrize("kind", ["text", "object", "time", "float0"])
def test_the_advice_fits_the_leaf(kind: str):
    """Text, objects, times and float0 are no integers: nobody is told to view them as such."""
    with pytest.raises(LeafTypeError) as error:
        to_torch(REFUSED[kind][0]())
    assert "view it as an integer" not in str(error.value)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jit(f)(jnp.ones(3)),
        lambda f: jax.vmap(f)(jnp.ones(3)),
        lambda f: jax.grad(f)(1.0),
        lambda f: jax.lax.scan(lambda carry, x: (f(x), None), 0.0, jnp.ones(3)),
    ],
    ids=["jit", "vmap", "grad", "scan"],
)
def test_a_tracer_is_named(transform: Callable[[Any], Any]):
    """A tracer has no values: it is refused by path, plain and in an ArrayDict."""
    errors = []

    def function(x: Any) -> Any:
        with pytest.raises(LeafTypeError) as error:
            to_torch({"plain": [x], "ad": ArrayDict({"x": x}), "ok": jnp.ones(1)})
        errors.append(listed(error.value))
        return jnp.sum(x)

    transform(function)
    reason = "got a tracer: convert outside of jit, vmap and grad."
    assert errors
    for found in errors:
        assert found["['plain', '0']"] == found["['ad', 'x']"] == reason


def test_a_tree_that_stands_for_arrays_is_named():
    """Shapes, specs and masks in an ArrayDict hold no values: no TensorDict can hold them."""
    ad = ArrayDict({"x": jnp.ones((2, 3)), "n": {"y": jnp.ones(2)}}, [2])
    shapes = jax.eval_shape(lambda tree: tree, ad)
    with pytest.raises(LeafTypeError) as error:
        to_torch(shapes)
    assert listed(error.value) == dict.fromkeys(
        ["['n', 'y']", "['x']"], "got a ShapeDtypeStruct, which holds no values."
    )
    for other in (True, None, jax.P("x")):
        tree = jax.tree.map(lambda _, other=other: other, ad)
        with pytest.raises(LeafTypeError, match=f"got a {type(other).__name__}, which holds no"):
            to_torch(tree)


def test_the_data_of_a_key_crosses_as_any_array():
    """What jax.random.key_data gives crosses, and makes the same key again."""
    key = jax.random.key(7)
    data = to_torch(jax.random.key_data(key))
    back = jax.random.wrap_key_data(to_jax(data))
    assert jax.random.uniform(back) == jax.random.uniform(key)
    assert data.dtype == torch.uint32


def test_a_jax_only_dtype_crosses_as_an_integer():
    """The advice for a dtype that torch lacks works: viewed as an integer, it comes back."""
    array = jnp.arange(4.0).astype("float8_e4m3")
    tensor = to_torch(jax.lax.bitcast_convert_type(array, jnp.uint8))
    back = jax.lax.bitcast_convert_type(to_jax(tensor), "float8_e4m3")
    assert back.tolist() == [0, 1, 2, 3]
