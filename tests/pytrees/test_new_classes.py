"""Classes that are defined after tdbridge was imported are pytrees from their first instance on."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorClass,
    TensorDict,
    TypedTensorDict,
    tensorclass,
)

import tdbridge
from tests import zoo


@tensorclass
class Decorated:
    x: torch.Tensor
    label: str = "none"


class Inherited(TensorClass):
    x: torch.Tensor
    label: str = "none"


class Further(Inherited):
    y: torch.Tensor | None = None


class Options(TensorClass["nocast"]):
    x: torch.Tensor
    label: str = "none"


class Plain(TensorDict):
    pass


class Deeper(Plain):
    pass


class Typed(TypedTensorDict):
    x: torch.Tensor


# Type checkers know nothing of `batch_size`.
decorated: Any = Decorated
typed: Any = Typed
X = torch.arange(6.0).reshape(2, 3)
MAKE = {
    "decorated": lambda: decorated(x=X, label="text", batch_size=[2]),
    "inherited": lambda: Inherited(x=X, label="text", batch_size=[2]),
    "further": lambda: Further(x=X, y=X[:, 0], label="text", batch_size=[2]),
    "options": lambda: Options(x=X, label="text", batch_size=[2]),
    "plain": lambda: Plain({"x": X, "label": "text"}, [2]),
    "typed": lambda: typed(x=X, batch_size=[2]),
    "deeper": lambda: Deeper({"x": X, "n": Plain({"y": X}, [2]), "label": "text"}, [2]),
}


def label(tree: Any) -> str | None:
    value = tree.get("label", None)
    return value.data if isinstance(value, NonTensorData) else value


each_class = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


@each_class
def test_an_instance_is_a_pytree_of_its_class(make):
    """JAX and optree map its leaves and give its class back, batch size and label included."""
    tree = make()
    for tree_map, leaves in (
        (jax.tree.map, jax.tree.leaves),
        (optree.tree_map, optree.tree_leaves),
    ):
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves(tree))
        assert any(leaf is X for leaf in leaves(tree))
        doubled: Any = tree_map(lambda t: t * 2, tree)
        assert type(doubled) is type(tree)
        assert doubled.batch_size == tree.batch_size
        assert torch.equal(doubled.get("x"), X * 2)
        assert label(doubled) == label(tree)


@each_class
def test_a_mask_of_it_is_of_its_class_and_definition(make):
    """The laws of the zoo hold for new classes too."""
    tree = make()
    mask = jax.tree.map(lambda _: True, tree)
    assert type(mask) is type(tree)
    assert jax.tree.structure(mask) == jax.tree.structure(tree)
    assert optree.tree_structure(mask) == optree.tree_structure(tree)


@each_class
def test_it_goes_to_jax_and_back(make):
    """to_jax keeps the class, so that to_torch gives an instance of it."""
    tree = make()
    back = tdbridge.to_torch(tdbridge.to_jax(tree))
    assert type(back) is type(tree)
    assert torch.equal(back.get("x"), X)


@each_class
def test_it_works_inside_a_transformation(make):
    """vmap and jit hand the function an instance of the class, with jax arrays."""
    tree = jax.tree.map(lambda t: jnp.asarray(t.numpy()), make())
    seen = []
    total = jax.jit(jax.vmap(lambda row: seen.append(row) or row.get("x").sum()))(tree)
    np.testing.assert_array_equal(total, X.sum(1).numpy())
    assert type(seen[0]) is type(tree)
    assert seen[0].batch_size == ()


def test_flattening_runs_no_code_of_the_class():
    """A tree that is put together again was constructed before: `__post_init__` stays out of it."""

    class Counted(TensorClass):
        x: torch.Tensor

        def __post_init__(self) -> None:
            self.x = self.x + 1

    new: Any = Counted
    tree = new(x=torch.zeros(2), batch_size=[2])
    back = jax.tree.map(lambda t: t, tree)
    assert type(back) is Counted
    assert back.x is tree.x
    assert torch.equal(back.x, torch.ones(2))
    assert jax.tree.map(lambda _: None, tree).x is None


def test_a_class_made_inside_a_function_is_registered():
    """It does not matter where, or how often under one name, a class is defined."""

    def define() -> type:
        class Local(TensorClass):
            x: torch.Tensor

        return Local

    first, second = define(), define()
    a, b = (jax.tree.structure(cls(x=X, batch_size=[2])) for cls in (first, second))
    assert a.num_leaves == b.num_leaves == 1
    assert a != b


@pytest.mark.parametrize(
    "cls", [TensorDict, zoo.Step, zoo.Batch, Decorated, Inherited, Plain, Typed]
)
def test_register_can_be_called_again(cls):
    """register() returns the class, warns of nothing and changes nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert tdbridge.register(cls) is cls
        assert tdbridge.register(cls) is cls
    assert caught == []


def test_register_is_a_decorator():
    """A class may say explicitly that it is a pytree."""

    @tdbridge.register
    class Explicit(TensorDict):
        pass

    assert len(jax.tree.leaves(Explicit({"x": X, "y": X}, [2]))) == 2


class Rows(LazyStackedTensorDict):
    """A lazy stack of another kind."""


@pytest.mark.parametrize(
    "other", [int, torch.Tensor, Rows, NonTensorData, "TensorDict", zoo.flat()]
)
def test_register_refuses_other_classes(other):
    """Anything but TensorDict, its subclasses and tensorclasses is a TypeError that names it."""
    message = f"expected TensorDict, a subclass of it or a tensorclass, got {other!r}."
    with pytest.raises(TypeError, match=re.escape(message)):
        tdbridge.register(other)


def test_a_subclass_of_what_is_not_carried_is_a_leaf():
    """Defining a class does not turn it into a node that cannot be flattened."""

    class Text(NonTensorData):
        pass

    for tree in (NonTensorData("text"), Text("text"), Rows(TensorDict(x=X), TensorDict(x=X))):
        assert [leaf is tree for leaf in jax.tree.leaves(tree)] == [True]
