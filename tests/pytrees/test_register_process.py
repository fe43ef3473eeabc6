"""What depends on the state of a process: who registered first, threads, torch's own registry."""

import pytest

FIRST = {
    "JAX": "jax.tree_util.register_pytree_node(TensorDict, flatten, unflatten)",
    "optree": "optree.register_pytree_node(TensorDict, flatten, unflatten, namespace=space)",
}
OTHERS = """
import warnings
import jax, numpy as np, optree, torch
from tensordict import TensorDict
space = optree.registry.__GLOBAL_NAMESPACE
def flatten(td):
    return tuple(td.values()), tuple(td.keys())
def unflatten(keys, values):
    return dict(zip(keys, values))
{first}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import tdbridge
print([str(w.message) for w in caught])
td = TensorDict({{"b": torch.arange(3.0), "n": {{"c": torch.ones(3, 2)}}}}, [3], names=["t"])
ad = tdbridge.to_jax({{"k": [td, torch.ones(2)]}})
assert isinstance(ad["k"][0], tdbridge.ArrayDict), ad
assert ad["k"][0].batch_size == ad["k"][0]["n"].batch_size == (3,)
assert ad["k"][0].names == ["t"]
np.testing.assert_array_equal(ad["k"][0]["b"], [0, 1, 2])
back = tdbridge.to_torch(ad)["k"][0]
assert type(back) is TensorDict and back.names == ["t"]
assert torch.equal(back["n", "c"], td["n", "c"])
rows = jax.vmap(lambda row: row["n", "c"].sum())(ad["k"][0])
np.testing.assert_array_equal(rows, [2, 2, 2])
assert type(jax.tree.map(lambda x: x, td)) is {jax_class}
assert type(optree.tree_map(lambda x: x, td)) is {optree_class}
"""


@pytest.mark.parametrize("where", FIRST)
def test_a_registration_that_is_there_stays(fresh, where):
    """One warning says whose registration stays; the conversions are right all the same."""
    classes = {"JAX": "TensorDict", "optree": "TensorDict", where: "dict"}
    code = OTHERS.format(
        first=FIRST[where], jax_class=classes["JAX"], optree_class=classes["optree"]
    )
    (line,) = fresh(code).splitlines()
    assert line.count("TensorDict is registered in") == 1
    assert f"TensorDict is registered in {where} by another library" in line


def test_another_namespace_of_optree_is_no_conflict(fresh):
    """What somebody registered in a namespace of their own costs no warning."""
    mine = 'optree.register_pytree_node(TensorDict, flatten, unflatten, namespace="mine")'
    code = OTHERS.format(first=mine, jax_class="TensorDict", optree_class="TensorDict")
    assert fresh(code) == "[]\n"


THREADS = """
import sys, threading, warnings
warnings.simplefilter("error")
sys.setswitchinterval(1e-6)
import jax, optree, torch
import tdbridge
from tensordict import TensorDict
shared = [type(f"Shared{i}", (TensorDict,), {}) for i in range(20)]
barrier, errors = threading.Barrier(16), []
def work(i):
    try:
        barrier.wait()
        for n, cls in enumerate(shared):
            tdbridge.register(cls)
            own = type(f"Own{i}_{n}", (TensorDict,), {})
            for c in (cls, own):
                td = c({"b": torch.ones(2, 3), "a": {"c": torch.zeros(2)}}, [2])
                for map_ in (jax.tree.map, optree.tree_map):
                    result = map_(lambda t: t + i, td)
                    assert type(result) is c and result.batch_size == (2,)
                    assert result["b"].sum() == 6 * (1 + i) and result["a", "c"].sum() == 2 * i
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
for t in threads: t.start()
for t in threads: t.join()
assert not errors, errors
"""


def test_classes_are_registered_and_flattened_from_many_threads(fresh):
    """Sixteen threads define, register and map classes at once: no error, no warning, no mix-up."""
    fresh(THREADS)


IMPORTS = """
import threading, warnings
warnings.simplefilter("error")
barrier, errors = threading.Barrier(8), []
def work():
    try:
        barrier.wait()
        import tdbridge, jax, torch
        from tensordict import TensorDict
        td = TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, [2])
        assert len(jax.tree.leaves(td)) == 2
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert not errors, errors
"""


def test_the_first_import_may_happen_in_many_threads(fresh):
    """Threads that import tdbridge at once all find it ready."""
    fresh(IMPORTS)


TORCH = """
import torch, torch.utils._pytree as pytree
{first}
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictParams
from tensordict import TensorClass, TensorDict
class Sub(TensorDict): pass
class Step(TensorClass):
    x: torch.Tensor
    label: str = "none"
x = torch.arange(6.0).reshape(2, 3)
trees = [
    TensorDict({{"b": x, "a": {{"c": x}}, "s": "text"}}, [2], names=["t"], device="cpu"),
    Step(x=x, batch_size=[2]), Sub({{"x": x}}, [2]), NonTensorData("text"),
    LazyStackedTensorDict(TensorDict(x=x), TensorDict(x=x)), TensorDictParams(TensorDict(x=x)),
]
for tree in trees:
    pairs, spec = pytree.tree_flatten_with_path(tree)
    back = pytree.tree_unflatten([leaf for _, leaf in pairs], spec)
    print([(pytree.keystr(path), type(leaf).__name__) for path, leaf in pairs], type(back).__name__)
    print(tuple(back.batch_size), getattr(back, "names", None), back.device)
"""


def test_torchs_pytrees_see_what_they_saw_without_tdbridge(fresh):
    """Paths, leaves, classes, names and devices are as in a process without the import."""
    assert fresh(TORCH.format(first="import tdbridge")) == fresh(TORCH.format(first=""))
