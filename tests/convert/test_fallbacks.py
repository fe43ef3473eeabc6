"""Without the private bindings of JAX the public ones give the same results."""

from contextlib import nullcontext
from operator import attrgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from tensordict import TensorDict

import tdbridge._compat.jax as compat
import tdbridge.convert.dlpack as dlpack
from tdbridge import CopyError, to_jax, to_torch
from tdbridge._compat.jax import dlpack_sources
from tdbridge._compat.torch import import_all
from tdbridge.convert.sharing import why_copied
from tests import zoo
from tests.convert.trees import address, aligned, listed, pairs, x64_for

PRIVATE = ["_batched_device_put", "_ArrayImpl", "_to_capsule"]


@pytest.fixture(params=[*PRIVATE, "all"])
def public(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One binding is missing, or all of them."""
    for name in PRIVATE if request.param == "all" else [request.param]:
        assert getattr(compat, name) is not None, f"{name} is not there on the tested version"
        monkeypatch.setattr(compat, name, None)
    return request.param


@pytest.mark.usefixtures("public")
@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("name", zoo.TREES)
def test_the_results_are_the_same(name: str, copy: bool | None):
    """Bits, sharing and freedom from a device do not depend on the binding."""
    td = zoo.TREES[name]()
    with x64_for(name):
        ad = to_jax(td, copy=copy)
        for path, tensor, array in pairs(td, ad):
            assert zoo.same_bits(np.asarray(array), zoo.as_numpy(tensor)), path
            assert not array.committed, path
            if tensor.numel():
                shared = copy is None and why_copied(tensor) is None
                assert (address(array) == address(tensor)) == shared, path
        back = to_torch(ad, copy=copy)
    for path, tensor, array in pairs(back, ad):
        assert zoo.same_bits(zoo.as_numpy(tensor), np.asarray(array)), path
        if tensor.numel():
            assert (address(array) == address(tensor)) == (copy is None), path


@pytest.mark.usefixtures("public")
def test_a_permuted_array_comes_to_torch_the_same():
    """An array of another layout is a strided tensor over the same memory, also by public calls."""
    array = to_jax(TensorDict({"x": torch.arange(6.0).reshape(2, 3)}))["x"]
    assert torch.equal(to_torch({"x": array.T})["x"], torch.arange(6.0).reshape(2, 3).t())


@pytest.mark.usefixtures("public")
def test_a_resize_raises_all_the_same():
    """The memory is pinned by torch's own `numpy()`, whatever JAX offers."""
    tensor = torch.ones(64)
    to_jax(tensor, copy=False)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)


@pytest.mark.usefixtures("public")
def test_while_jax_traces():
    """Inside jit a tensor becomes a constant, not a tracer that is copied at each step."""
    tensor = torch.arange(4.0)

    def add(x):
        array = to_jax(tensor, copy=False)
        assert not isinstance(array, Tracer)
        return x + array

    assert jax.jit(add)(jnp.ones(4)).tolist() == [1, 2, 3, 4]


@pytest.mark.usefixtures("public")
def test_under_another_default_device():
    """`jax.default_device` does not move what was not asked to move."""
    tensor = torch.arange(16.0)
    with jax.default_device(jax.devices("cpu")[3]):
        assert address(to_jax(tensor, copy=False)) == address(tensor)


@pytest.mark.parametrize(
    "kind", ["tensor", "parameter", "numpy", "memory_mapped", "beside_an_empty"]
)
def test_sharing_is_checked_and_not_assumed(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path):
    """If a version of JAX copied what it could share, copy=False would say so, for every leaf."""
    put = dlpack.put
    monkeypatch.setattr(dlpack, "put", lambda views, *rest: put([aligned(v) for v in views], *rest))
    tensor = torch.ones(16)
    trees = {
        "tensor": {"x": tensor},
        "parameter": {"x": torch.nn.Parameter(tensor)},
        "numpy": {"x": aligned(np.ones(16, np.float32))},
        "memory_mapped": TensorDict({"x": tensor}).memmap(tmp_path),
        "beside_an_empty": {"x": tensor, "e": torch.ones(16)[3:3]},
    }
    with pytest.raises(CopyError) as error:
        to_jax(trees[kind], copy=False)
    assert list(listed(error.value)) == ["['x']"]


def test_capsules_and_arrays_are_imported_side_by_side():
    """On a machine with an accelerator some arrays come as capsules and some as they are."""
    array = jnp.arange(3.0)
    sources = [*dlpack_sources([array]), array]
    assert [tensor.tolist() for tensor in import_all(sources)] == [[0.0, 1.0, 2.0]] * 2
    assert import_all([]) == []


@pytest.mark.parametrize("name", zoo.TREES)
def test_arrays_come_to_torch_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    """Without JAX's own ways to wait, to find the shard and to judge all arrays at once."""
    assert compat._await_all is not None
    assert compat._first_shard is not None
    with x64_for(name):
        ad = to_jax(zoo.TREES[name](), copy=True)
        fast = zoo.leaves(to_torch(ad))
        for attribute in ("_await_all", "_first_shard"):
            monkeypatch.setattr(compat, attribute, None)
        monkeypatch.setattr(compat, "_sharding_of", attrgetter("_no_such_attribute"))
        back = to_torch(ad)
    expected = zoo.expected(name)
    for path, tensor, array in pairs(back, ad):
        assert zoo.same_bits(zoo.as_numpy(tensor), expected[path]), path
        if tensor.numel():
            assert address(tensor) == address(array) == address(fast[path]), path


def test_arrays_are_judged_the_same(monkeypatch: pytest.MonkeyPatch):
    """Dtypes and kinds of sharding are found in either way, PRNG keys included."""
    mesh = jax.make_mesh((8,), ("x",))
    split = jax.device_put(jnp.zeros(8, jnp.int8), NamedSharding(mesh, PartitionSpec("x")))
    plain = [jnp.ones(3), jnp.ones(3, jnp.bfloat16)]
    cases = {
        "plain": (plain, {np.dtype("float32"), jnp.dtype(jnp.bfloat16)}, {SingleDeviceSharding}),
        "split": ([split], {np.dtype("int8")}, {NamedSharding}),
        "key": ([jax.random.key(0)], {jax.random.key(0).dtype}, {SingleDeviceSharding}),
        "none": ([], set(), set()),
    }  # fmt: skip
    for fallback in (False, True):
        if fallback:
            monkeypatch.setattr(compat, "_aval_of", attrgetter("_no_such_attribute"))
            monkeypatch.setattr(compat, "_sharding_of", attrgetter("_no_such_attribute"))
        for arrays, dtypes, shardings in cases.values():
            assert compat.dtypes_of(arrays) == dtypes
            assert compat.shardings_of(arrays) == shardings


def test_what_went_wrong_in_a_computation_is_raised(monkeypatch: pytest.MonkeyPatch):
    """Both ways of waiting raise for an array that was deleted."""
    array = jnp.ones(3) * 2
    compat.wait([array, array])
    array.delete()
    for fallback in (False, True):
        if fallback:
            monkeypatch.setattr(compat, "_await_all", None)
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            compat.wait([array])


@pytest.mark.parametrize("guard", [None, "allow", "disallow", "log"])
def test_no_guard_stops_a_conversion(guard: str | None):
    """A conversion is no implicit transfer; where no transfer is guarded, nothing is set."""
    with jax.transfer_guard(guard) if guard else nullcontext():
        assert isinstance(compat._no_guard(), nullcontext) == (guard in (None, "allow"))
        tensor = torch.arange(16.0)
        assert address(to_jax(tensor, copy=False)) == address(tensor)
        assert float(to_jax(torch.tensor(2.0))) == 2.0
