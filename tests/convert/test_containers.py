"""What tensors stand in: the trees of JAX, equinox, flax and optax, and plain dataclasses."""

from collections import OrderedDict, namedtuple
from dataclasses import FrozenInstanceError, dataclass, field
from functools import cached_property
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen, nnx, struct
from flax.core import freeze
from tensordict import TensorDict

import tdbridge
from tdbridge import ArrayDict, LeafTypeError, PRNGKey, to_jax, to_torch
from tests import zoo
from tests.convert.trees import address, listed

Pair = namedtuple("Pair", ["first", "second"])


@jax.tree_util.register_dataclass
@dataclass
class Known:
    """A dataclass that JAX knows."""

    x: Any
    note: str = field(metadata={"static": True}, default="note")


@struct.dataclass
class State:
    x: Any
    note: str = struct.field(pytree_node=False, default="note")


class Module(eqx.Module):
    x: Any
    note: str = eqx.field(static=True, default="note")


CONTAINERS = {
    "dict": lambda x: {"x": x},
    "ordered": lambda x: OrderedDict(b=x, a=1),
    "list": lambda x: [x, None],
    "tuple": lambda x: (None, x),
    "namedtuple": lambda x: Pair(x, "second"),
    "registered": Known,
    "struct": State,
    "frozen_dict": lambda x: freeze({"x": x}),
    "equinox": Module,
}


def among(tree: Any, *kinds: type) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_comes_back_over_other_leaves(container: str):
    """Any container that JAX knows holds tensors, TensorDicts, arrays, ArrayDicts in turn."""
    make = CONTAINERS[container]
    there = to_jax(make([torch.arange(3.0), zoo.nested()]))
    array, ad = among(there, jax.Array, ArrayDict)
    assert jax.tree.structure(there) == jax.tree.structure(make([array, ad]))
    assert (array.tolist(), ad.batch_size, ad.names) == ([0, 1, 2], (4,), ["time"])
    back = to_torch(there)
    assert type(back) is type(make(0))
    tensor, td = among(back, torch.Tensor, TensorDict)
    assert tensor.tolist() == [0, 1, 2]
    assert zoo.described(td) == zoo.described(zoo.nested())


def same(tree: Any) -> Any:
    """The tree over torch and back; structure, dtypes and bits have to be the same."""
    back = to_jax(to_torch(tree))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        if not jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
            assert np.asarray(new).tobytes() == np.asarray(old).tobytes()
    return back


def test_an_equinox_model_computes_the_same():
    """Its weights cross; functions and sizes in it stay what they are."""
    model = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    there = to_torch(model)
    assert isinstance(there.layers[0].weight, torch.Tensor)
    assert there.activation is model.activation
    back, x = to_jax(there), jnp.ones(2)
    assert back(x).tolist() == model(x).tolist()


def test_linen_parameters_compute_the_same():
    """The dicts of flax.linen go to torch and back."""
    layer = linen.Dense(3)
    params = layer.init(jax.random.key(0), jnp.ones((1, 2)))
    assert isinstance(to_torch(params)["params"]["kernel"], torch.Tensor)
    outputs: list[Any] = [layer.apply(tree, jnp.ones((1, 2))) for tree in (same(params), params)]
    assert outputs[0].tolist() == outputs[1].tolist()


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.norm(self.linear(x)))


def test_nnx_state_goes_back_into_its_module():
    """Parameters, statistics and random state cross, the typed key among them."""
    net = Net(nnx.Rngs(0))
    definition, state = nnx.split(net)
    there = to_torch(state)
    assert isinstance(there["drop"]["rngs"]["key"].get_value(), PRNGKey)
    x = jnp.ones((4, 2))
    assert nnx.merge(definition, same(state))(x).tolist() == net(x).tolist()
    assert jax.tree.structure(same(nnx.state(net, nnx.Param))) == jax.tree.structure(
        nnx.state(net, nnx.Param)
    )


def test_the_state_of_an_optimizer_follows_its_parameters():
    """optax over an ArrayDict has ArrayDicts in its state, which become TensorDicts."""
    params = to_jax(TensorDict({"w": zoo.pattern("float32", 3, 2), "b": torch.ones(2)}))
    optimizer = optax.adam(0.1)
    state = optimizer.init(params)
    there = to_torch(state)
    assert isinstance(there[0].mu, TensorDict)
    with jax.numpy_dtype_promotion("standard"):
        new, old = optimizer.update(params, same(state)), optimizer.update(params, state)
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, new, old)))


def test_the_state_of_parameters_is_of_parameters():
    """optax over TensorDictParams keeps their class, and so does what comes back."""
    params = to_jax(zoo.params())
    state: Any = optax.sgd(0.1, momentum=0.9).init(params)
    assert jax.tree.structure(state[0].trace) == jax.tree.structure(params)
    assert type(to_torch(state)[0].trace) is type(zoo.params())


# --- dataclasses that JAX does not know


@dataclass
class Sample:
    """Says when it is constructed, and has a field that is no argument."""

    x: Any
    name: str = "name"
    inner: Any = None
    made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.made += 1
        assert self.name != "unpacked", "constructed again"


@dataclass(frozen=True)
class Frozen:
    x: Any
    n: int = 1


@dataclass(frozen=True, slots=True)
class Slots:
    x: Any
    n: int = 1


@dataclass(slots=True)
class OpenSlots:
    x: Any
    n: int = 1


@pytest.mark.parametrize("cls", [Sample, Frozen, Slots, OpenSlots])
def test_the_fields_of_a_dataclass_cross(cls: Any):
    """Its tensors become arrays, in a copy; it and its other fields stay what they are."""
    source = cls(torch.arange(3.0), "n" if cls is Sample else 7)
    there = to_jax({"d": source})["d"]
    assert type(there) is cls
    assert isinstance(there.x, jax.Array)
    assert address(there.x) == address(source.x)
    assert isinstance(source.x, torch.Tensor)
    back = to_torch(there)
    assert back.x.tolist() == [0, 1, 2]
    name = "name" if cls is Sample else "n"
    assert getattr(back, name) == getattr(source, name)
    if cls in (Frozen, Slots):
        with pytest.raises(FrozenInstanceError):
            there.x = 1


def test_a_dataclass_is_not_constructed_again():
    """Neither __init__ nor __post_init__ runs: fields that were changed since stay changed."""
    source = Sample(torch.ones(2))
    source.name, source.extra = "unpacked", {"seen"}  # pyright: ignore[reportAttributeAccessIssue]
    there = to_jax([source])[0]
    assert (there.name, there.made, there.extra) == ("unpacked", 1, {"seen"})
    assert isinstance(there.x, jax.Array)


@dataclass(frozen=True)
class Cached:
    """A dataclass that keeps what it has computed of its fields."""

    x: Any

    @cached_property
    def double(self) -> Any:
        return self.x + self.x


def test_what_a_dataclass_has_cached_is_computed_again():
    """A cached property of the copy is of its own fields, and the source keeps its own."""
    source = Cached(torch.ones(2))
    double = source.double
    got = to_jax([source])[0]
    assert isinstance(got.double, jax.Array)
    assert got.double.tolist() == [2, 2]
    assert source.double is double


def test_dataclasses_are_opened_at_every_depth():
    """In containers, in each other, in TensorDicts' neighbours; keys and PRNG keys included."""
    tree = Sample([Frozen(zoo.nested()), None], inner={"k": Slots(np.ones(2, "float32"))})
    there = to_jax((tree, 3))[0]
    assert isinstance(there.x[0].x, ArrayDict)
    assert isinstance(there.inner["k"].x, jax.Array)
    back = to_torch(there)
    assert zoo.described(back.x[0].x) == zoo.described(zoo.nested())
    assert to_torch(Frozen(jax.random.key(0))).x.impl == "threefry2x32"


def test_a_dataclass_without_tensors_is_the_same_object():
    """A configuration passes as any other value does; what holds it is what it was."""
    config, shared = Sample("x", inner=[1, {"a": 2}]), [1, 2]
    tree = {"c": config, "d": Sample(torch.ones(1), inner=shared)}
    there = to_jax(tree)
    assert there["c"] is config
    assert there["d"].inner is shared


@dataclass
class Output(dict):
    """A dataclass that holds its fields as items too, as the outputs of some models do."""

    x: Any

    def __post_init__(self) -> None:
        self["x"] = self.x


def test_a_dataclass_that_is_a_dict_too_is_left_whole():
    """Its attributes and its items are one thing: neither is converted without the other."""
    output = Output(torch.ones(2))
    assert to_jax([output])[0] is output
    assert output.x is output["x"]


def test_a_dataclass_inside_of_itself_is_left():
    """A reference back to the dataclass is not followed."""
    source = Sample(torch.ones(1))
    source.inner = source
    there = to_jax(source)
    assert isinstance(there.x, jax.Array)
    assert there.inner is source


def test_a_field_that_was_never_set_is_no_field():
    """A slot without a value stays without one."""
    source = OpenSlots(torch.ones(1))
    del source.n
    there = to_jax(source)
    assert isinstance(there.x, jax.Array)
    assert not hasattr(there, "n")


def test_errors_and_explain_name_the_field():
    """Paths go through dataclasses by the names of the fields."""
    good = [Sample(torch.ones(2), inner=Slots(zoo.flat()))]
    rows = tdbridge.explain(good, to="jax").rows
    assert [row.path for row in rows] == [
        ("0", "x"), ("0", "inner", "x", "b"), ("0", "inner", "x", "a"),
    ]  # fmt: skip
    bad = {"d": Sample(torch.eye(2).to_sparse(), inner=Frozen([torch.eye(2).to_sparse()]))}
    with pytest.raises(LeafTypeError) as error:
        to_jax(bad)
    assert list(listed(error.value)) == ["['d', 'x']", "['d', 'inner', 'x', '0']"]
    rows = tdbridge.explain(bad, to="jax").rows
    assert [row.fate for row in rows] == ["refused", "refused"]


def test_a_class_is_no_tree_of_that_class():
    """What names a class of trees, as a configuration may, stays as any other value does."""
    tree = {"x": torch.ones(1), "d": Sample(torch.ones(1), inner=TensorDict)}
    there = to_jax(tree)
    assert there["d"].inner is to_torch(there)["d"].inner is TensorDict
    assert ArrayDict({"cls": TensorDict})["cls"] is TensorDict


def test_a_dataclass_cannot_hide_a_tracer():
    """to_torch inside jit names it, wherever it is."""

    @jax.jit
    def step(x):
        with pytest.raises(LeafTypeError, match=r"\['x'\]: got a tracer"):
            to_torch(Frozen(x))
        return x

    step(jnp.ones(1))
