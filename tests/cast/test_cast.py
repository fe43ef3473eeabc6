"""`cast`: which leaves change their dtype, and that all else stays what it is."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from tensordict import TensorClass, TensorDict, is_floating, is_inexact

from tdbridge import ArrayDict, LeafTypeError, cast, to_jax
from tests import zoo
from tests.layout.check import assert_same_nodes
from tests.pytrees.trees import STRUCTURES

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = {name for name in zoo.BOTH if name.startswith(("float", "bfloat"))}


def expected(array: np.ndarray, name: str) -> np.ndarray:
    """What a cast of the zoo's numbers gives: they are small integers, so that it is exact."""
    return array.astype(zoo.numpy_dtype(name)) if array.dtype.name in FLOATS else array


def dtypes(tree: Any) -> dict[tuple[str, ...], str]:
    """The dtypes of a TensorDict or ArrayDict by path, as numpy names them."""
    if not isinstance(tree, ArrayDict):
        return {p: str(t.dtype).removeprefix("torch.") for p, t in zoo.leaves(tree).items()}
    pairs = tree.items(include_nested=True, leaves_only=True)
    return {(k if isinstance(k, tuple) else (k,)): str(v.dtype) for k, v in pairs}


@pytest.mark.parametrize("name", zoo.TREES)
def test_floats_of_a_tensordict_are_cast_and_the_rest_stays(name: str):
    """Each floating-point leaf has the new dtype, any other leaf is the same tensor."""
    td = zoo.TREES[name]()
    got = cast(td, torch.bfloat16)
    assert_same_nodes(got, td)
    old, new = zoo.leaves(td), zoo.leaves(got)
    for path, array in zoo.expected(name).items():
        assert zoo.same_bits(zoo.as_numpy(new[path]), expected(array, "bfloat16")), path
        assert (new[path] is old[path]) == (array.dtype.name not in FLOATS - {"bfloat16"}), path


@pytest.mark.parametrize("name", STRUCTURES)
def test_an_arraydict_is_cast_as_the_tensordict_is(name: str):
    """The same structure, static half included, and the numbers that torch has."""
    td = zoo.TREES[name]()
    got = cast(to_jax(td), "bfloat16")
    assert jax.tree.structure(got) == jax.tree.structure(to_jax(cast(td, "bfloat16")))
    for path, array in zoo.expected(name).items():
        assert zoo.same_bits(np.asarray(got[path]), expected(array, "bfloat16")), path


@pytest.mark.parametrize("name", zoo.KINDS)
def test_every_kind_of_tree_is_cast(name: str):
    """Lazy stacks, jagged tensors, parameters and values per element stay what they are."""
    td = zoo.KINDS[name]()
    assert zoo.described(cast(cast(td, torch.float64), torch.float32)) == zoo.described(td)
    there, parts = cast(to_jax(td), jnp.bfloat16), jax.tree.leaves(to_jax(td))
    for leaf, old in zip(jax.tree.leaves(there), parts, strict=True):
        assert leaf.dtype == (BF16 if old.dtype == np.float32 else old.dtype)


def mixed() -> TensorDict:
    numbers = {name: zoo.pattern(name, 2) for name in ("float32", "int32", "bool", "complex64")}
    return TensorDict(
        {**numbers, "norm": {"w": torch.ones(2)}, "moe": {"router": {"w": torch.ones(2)}}}
    )


@pytest.mark.parametrize("side", ["torch", "jax"])
@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (None, {}),
        ("norm", {("norm", "w"): "float32"}),
        ("*/w", {("norm", "w"): "float32", ("moe", "router", "w"): "float32"}),
        (["*router*", "float32"], {("moe", "router", "w"): "float32", ("float32",): "float32"}),
        (lambda path: path[-1] == "w" and path[0] == "moe", {("moe", "router", "w"): "float32"}),
        (
            {"norm": None, "*": "float16"},
            dict.fromkeys([("moe", "router", "w"), ("float32",)], "float16")
            | {("norm", "w"): "float32"},
        ),
    ],
)
def test_kept_paths_stay_or_get_a_dtype_of_their_own(side: str, keep: Any, kept: dict[Any, str]):
    """Globs, a predicate and a mapping decide by path; integers, masks and complex never change."""
    td = mixed()
    got = cast(td if side == "torch" else to_jax(td), "bfloat16", keep=keep)
    floats = {("float32",), ("norm", "w"), ("moe", "router", "w")}
    assert dtypes(got) == dtypes(td) | dict.fromkeys(floats, "bfloat16") | kept
    if side == "jax":
        packed = cast(to_jax(td).pack(), "bfloat16", keep=keep)
        assert dtypes(packed.unpack()) == dtypes(got)


def test_where_is_asked_for_a_dtype():
    """`is_inexact` takes complex leaves in, to a complex dtype alone; any predicate will do."""
    td = mixed()
    assert dtypes(cast(td, torch.complex128, where=is_inexact))[("complex64",)] == "complex128"
    assert dtypes(cast(td, torch.float64, where=is_inexact))[("complex64",)] == "complex64"
    got = cast(td, torch.float32, where=lambda leaf: leaf.dtype == torch.int32)
    assert dtypes(got) == dtypes(td) | {("int32",): "float32"}


class Mesh(TensorClass, cast_filter=lambda path, leaf: path[-1] != "points" and is_floating(leaf)):
    """A class that keeps one of its fields out of casts."""

    points: torch.Tensor
    heat: torch.Tensor
    more: TensorDict | None = None


def mesh() -> TensorDict:
    more = TensorDict({"points": torch.ones(2), "x": torch.ones(2)}, [2])
    inner = Mesh(points=torch.ones(2), heat=torch.ones(2), more=more, batch_size=[2])
    return TensorDict({"mesh": inner, "points": torch.ones(2)}, [2])


@pytest.mark.parametrize("side", ["torch", "jax", "packed"])
def test_the_filter_of_a_class_is_honoured_in_its_part_of_the_tree(side: str):
    """It sees paths from the node of its class on; another `where` overrides it, as in stock."""
    td = mesh()
    tree = {"torch": td, "jax": to_jax(td), "packed": to_jax(td).pack()}[side]
    kept = {("mesh", "points"), ("mesh", "more", "points")}
    for where, expected in ((is_floating, kept), (is_inexact, set())):
        got = cast(tree, torch.bfloat16, where=where)
        got = got.unpack() if side == "packed" else got
        assert {p for p, name in dtypes(got).items() if name == "float32"} == expected


def test_a_pytree_is_cast_leaf_by_leaf():
    """Tensors, arrays of both kinds, trees of ours; what holds no numbers is left alone."""
    w = torch.ones(2)
    tree = {
        "tied": [w, w],
        "td": TensorDict(x=torch.ones(2)),
        "ad": ArrayDict({"x": jnp.ones(2)}).pack(),
        "np": np.ones(2),
        "scalar": np.float32(2),
        "shape": jax.ShapeDtypeStruct((3,), jnp.float32),
        "key": jax.random.key(0),
        "int4": jnp.ones(2, jnp.int4),
        "other": (3.5, "text", None),
    }
    got = cast(tree, "float16", keep="td/*")
    assert got["tied"][0].dtype == torch.float16
    assert got["tied"][0] is got["tied"][1]
    assert got["td"]["x"].dtype == torch.float32
    assert [str(got[k].dtype) for k in ("np", "scalar", "shape")] == ["float16"] * 3
    assert isinstance(got["np"], np.ndarray)
    assert got["ad"].segments[0].dtype == np.float16
    assert got["key"] is tree["key"]
    assert got["int4"] is tree["int4"]
    assert got["other"] == tree["other"]


def test_a_lock_stays():
    """A locked tree is cast to a locked one, as in stock."""
    assert cast(zoo.nested().lock_(), torch.bfloat16).is_locked
    assert not cast(zoo.nested(), torch.bfloat16).is_locked


@pytest.mark.parametrize("dtype", ["int32", torch.bool, "int4", "complex32", "bf16", object(), str])
def test_only_numbers_with_a_fraction_are_cast_to(dtype: Any):
    """An integer dtype, one of a single framework and what is no dtype are refused."""
    with pytest.raises(LeafTypeError, match="got "):
        cast(zoo.nested(), dtype)


def test_a_gradient_passes_through_in_torch():
    """The gradient of a cast leaf comes back in the dtype that the leaf had."""
    td = TensorDict(w=torch.tensor([1.0, float("nan"), 3.0]), n={"b": torch.ones(2)})
    td.requires_grad_()
    got = cast(td, torch.bfloat16, keep="n")
    (got["w"] * torch.tensor([1, 2, 3])).float().sum().backward()
    assert td["w"].grad.tolist() == [1.0, 2.0, 3.0]
    assert got["n", "b"] is td["n", "b"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_gradient_passes_through_in_jax(packed: bool):
    """Under jit too, packed too, and where a value is NaN or too large for the new dtype."""
    values = jnp.array([1.0, jnp.nan, 1e6])
    tree = ArrayDict({"w": values, "n": {"b": jnp.ones(2)}, "i": jnp.arange(2)})
    floats = tree.exclude("i")

    def loss(params: Any) -> jax.Array:
        low = cast(params, "float8_e4m3fn", keep="n" if not packed else None)
        return (low["w"].astype("float32") * jnp.array([1.0, 2.0, 3.0])).sum()

    got = jax.jit(jax.grad(loss))(floats.pack() if packed else floats)
    assert got["w"].dtype == np.float32
    assert got["w"].tolist() == [1.0, 2.0, 3.0]
    assert got["n", "b"].tolist() == [0.0, 0.0]


def test_it_is_traced_by_transformations():
    """jit, vmap and eval_shape see a tree of the new dtypes."""
    tree = to_jax(zoo.nested())
    got = jax.vmap(lambda t: cast(t, "bfloat16"))(tree)
    assert got["obs"].dtype == BF16
    assert got["deep", "er", "est"].dtype == np.int16
    shapes = jax.eval_shape(lambda t: cast(t, "bfloat16"), tree)
    again = cast(jax.eval_shape(lambda t: t, tree), "bfloat16")
    assert jax.tree.leaves(shapes) == jax.tree.leaves(again)


def test_a_packed_tree_keeps_its_definition():
    """It is cast by segment, so that gradients by the low-precision copy fit the parameters."""
    packed = ArrayDict({"w": jnp.ones((2, 3)), "b": jnp.ones(5), "i": jnp.arange(2)}).pack()
    low = cast(packed, "bfloat16")
    assert jax.tree.structure(low) == jax.tree.structure(packed)
    assert [str(s.dtype) for s in low.segments] == ["bfloat16", "int32"]
    assert low.segments[1] is packed.segments[1]
    assert low["w"].tolist() == [[1.0] * 3] * 2
    assert [str(s.dtype) for s in cast(low, "float32").segments] == ["float32", "int32"]


def test_64_bits_need_no_x64_mode():
    """An array is cast to float64 and back whether x64 is on or not."""
    got = cast(ArrayDict({"x": jnp.array([0.1])}), "float64")
    assert got["x"].dtype == np.float64
    assert cast(got, "float32")["x"].tolist() == [np.float32(0.1)]
