"""The round trip, from either side, gives the same tree: bits, classes and static data."""

import math
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tensordict import NonTensorData, TensorClass, TensorDict

from tdbridge import ArrayDict, to_jax, to_torch
from tests import zoo
from tests.convert.trees import extremes, tensor_of, x64_for

COPY = pytest.mark.parametrize("copy", [None, True])


class Tally(TensorClass):
    """A tensorclass whose constructor changes its values."""

    count: torch.Tensor

    def __post_init__(self) -> None:
        self.count = self.count + 1


class Settled(TensorClass["skip_post_init_on_rebuild"]):
    """The same, of a tensorclass that says that a rebuild is no construction."""

    count: torch.Tensor

    def __post_init__(self) -> None:
        self.count = self.count + 1


class Strict(TensorClass["tensor_only"]):
    """A tensorclass of tensors alone."""

    a: torch.Tensor
    b: torch.Tensor


class Frozen(TensorClass["frozen"]):
    """A tensorclass that cannot be changed."""

    a: torch.Tensor


def non_tensors(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    return {
        (*where, key): value.data
        for where, node in zoo.nodes(tree).items()
        for key, value in node.items()
        if isinstance(value, NonTensorData)
    }


def assert_same(got: Any, tree: Any) -> None:
    nodes = zoo.nodes(tree)
    assert zoo.nodes(got).keys() == nodes.keys()
    for path, node in zoo.nodes(got).items():
        assert type(node) is type(nodes[path])
        assert node.batch_size == nodes[path].batch_size
        assert node.names == nodes[path].names
        assert set(node.keys()) == set(nodes[path].keys())
    leaves = zoo.leaves(tree)
    assert zoo.leaves(got).keys() == leaves.keys()
    for path, tensor in zoo.leaves(got).items():
        assert type(tensor) is torch.Tensor
        assert tensor.dtype == leaves[path].dtype
        assert zoo.same_bits(zoo.as_numpy(tensor), zoo.as_numpy(leaves[path]))
    static = non_tensors(tree)
    assert non_tensors(got).keys() == static.keys()
    for path, value in non_tensors(got).items():
        assert value is static[path]


@COPY
@pytest.mark.parametrize("name", zoo.TREES)
def test_a_tensordict_comes_back(name: str, copy: bool | None):
    """torch -> JAX -> torch keeps class, keys, batch sizes, names, static data and bits."""
    tree = zoo.TREES[name]()
    with x64_for(name):
        got = to_torch(to_jax(tree, copy=copy), copy=copy)
    assert_same(got, zoo.TREES[name]() if name != "non_tensors" else tree)


@COPY
@pytest.mark.parametrize("name", zoo.TREES)
def test_an_arraydict_comes_back(name: str, copy: bool | None):
    """JAX -> torch -> JAX gives an ArrayDict of the same pytree definition and bits."""
    with x64_for(name):
        ad = to_jax(zoo.TREES[name]())
        got = to_jax(to_torch(ad, copy=copy), copy=copy)
    assert type(got) is ArrayDict
    assert jax.tree.structure(got) == jax.tree.structure(ad)
    assert got.batch_size == ad.batch_size
    assert got.names == ad.names
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(ad), strict=True):
        assert zoo.same_bits(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("cls", [Tally, Settled])
def test_a_tensorclass_is_not_constructed_anew(cls: Any):
    """`__post_init__` does not run again: the values that came back are the values that went."""
    step = cls(count=torch.zeros(2), batch_size=[2])
    assert step.count.tolist() == [1, 1]
    got = to_torch(to_jax(step))
    assert type(got) is cls
    assert got.count.tolist() == [1, 1]


def test_tensorclasses_of_other_kinds_come_back():
    """`tensor_only` and `frozen` tensorclasses keep their class, fields and values."""
    strict = Strict(a=torch.ones(2), b=torch.zeros(2, 3), batch_size=[2])
    frozen = Frozen(a=torch.ones(2), batch_size=[2])
    assert_same(to_torch(to_jax(strict)), strict)
    assert_same(to_torch(to_jax(frozen)), frozen)


def test_a_pytree_comes_back():
    """A pytree of tensors, tensordicts and other values comes back equal."""
    tree = {"a": [torch.arange(3, dtype=torch.int32), (None, 2.5, "s")], "td": zoo.nested()}
    got = to_torch(to_jax(tree))
    assert got["a"][1] == (None, 2.5, "s")
    assert torch.equal(got["a"][0], tree["a"][0])
    assert_same(got["td"], tree["td"])


@COPY
def test_what_jax_changed_comes_back_changed(copy: bool | None):
    """The work of JAX is on the leaves alone: class, names and static data come back around it."""
    tree = zoo.TREES["tensorclass"]()
    got = to_torch(jax.jit(lambda ad: ad.map(lambda x: x * 2.0))(to_jax(tree)), copy=copy)
    assert_same(got, tree.apply(lambda leaf: leaf * 2))
    assert (got.label, got.after.label, got.weight) == ("now", "after", None)


def test_vmap_and_stacking_change_the_batch_size_that_comes_back():
    """A tree that JAX gave another leading shape comes back with the batch size of that shape."""
    ad = to_jax(zoo.flat())
    assert to_torch(ArrayDict.stack([ad, ad])).batch_size == torch.Size([2, 4])
    assert to_torch(ad[1:3]).batch_size == torch.Size([2])
    summed = to_torch(jax.vmap(lambda row: {"s": row["b"].sum(), "row": row})(ad))
    assert summed["row"].batch_size == torch.Size([4])
    assert summed["s"].shape == (4,)


# --- property: any tree


KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=4)


@st.composite
def tensors(draw: st.DrawFn, batch: tuple[int, ...]) -> torch.Tensor:
    """A tensor of any dtype whose shape starts with `batch`, as a view of odd strides or offset."""
    name = draw(st.sampled_from(zoo.BOTH))
    event = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    shape = (*batch, *event)
    start, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    values = np.resize(extremes(name), start + step * max(math.prod(shape), 1))
    flat = tensor_of(values)[start::step][: math.prod(shape)]
    order = draw(st.permutations(range(len(shape))))
    permuted = flat.reshape([shape[i] for i in order])
    return permuted.permute([order.index(i) for i in range(len(shape))])


@st.composite
def tensordicts(draw: st.DrawFn, depth: int = 2, batch: tuple[int, ...] | None = None) -> Any:
    """A TensorDict of any keys, dtypes and strides, with nested ones that extend its batch size."""
    if batch is None:
        batch = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    entries = draw(st.dictionaries(KEYS, tensors(batch), max_size=3))
    if depth:
        more = (*batch, 2) if draw(st.booleans()) else batch
        entries |= draw(st.dictionaries(KEYS, tensordicts(depth - 1, more), max_size=2))
    names = [f"d{i}" for i in range(len(batch))] if draw(st.booleans()) else None
    return TensorDict(entries, batch, names=names)


@settings(max_examples=60)
@given(td=tensordicts(), copy=st.sampled_from([None, True]))
def test_any_tensordict_comes_back(td: TensorDict, copy: bool | None):
    """The round trip is the identity for any keys, batch sizes, dtypes, strides and offsets."""
    with jax.enable_x64(True):
        assert_same(to_torch(to_jax(td, copy=copy), copy=copy), td)


CONTAINERS = st.recursive(
    st.one_of(
        st.none(), st.integers(), st.text(max_size=3),
        st.builds(lambda n: torch.arange(n, dtype=torch.int32), st.integers(0, 4)),
        st.builds(lambda n: TensorDict({"x": torch.arange(float(n))}, [n]), st.integers(0, 4)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=60)
@given(tree=CONTAINERS)
def test_any_pytree_comes_back(tree: Any):
    """The round trip is the identity for nested lists, tuples and dicts of any leaves."""
    got = to_torch(to_jax(tree))
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(tree), strict=True):
        assert type(ours) is type(theirs)
        equal = torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
        assert equal


def test_the_comparison_sees_a_difference():
    """The helper of these tests fails on another bit, name, class or key."""
    td = TensorDict({"x": torch.zeros(2)}, [2], names=["a"])
    for other in (
        TensorDict({"x": -torch.zeros(2)}, [2], names=["a"]),
        TensorDict({"x": torch.zeros(2)}, [2]),
        TensorDict({"y": torch.zeros(2)}, [2], names=["a"]),
        zoo.Batch({"x": torch.zeros(2)}, [2], names=["a"]),
    ):
        with pytest.raises(AssertionError):
            assert_same(other, td)
    assert jnp.signbit(to_jax(-torch.zeros(1)))[0]
