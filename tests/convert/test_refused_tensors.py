"""What to_jax cannot carry is refused before anything is converted, every leaf with its path."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.masked import masked_tensor
from torch.utils._pytree import tree_map

from tdbridge import LeafTypeError, consolidate, to_jax
from tests.convert.trees import listed

pytestmark = [
    # What torch says of the kinds of tensors that are made here, to be refused.
    pytest.mark.filterwarnings("ignore:.*(prototype|beta|experimental|deprecated)"),
]


class Wrapper(torch.Tensor):
    """A tensor that holds its values in another one and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        new: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        new.held = inner
        return new

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(x: Any) -> Any:
            return getattr(x, "held", x)

        def wrap(x: Any) -> Any:
            return Wrapper(x) if isinstance(x, torch.Tensor) else x

        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        return tree_map(wrap, out)


class Traceable(Wrapper):
    """A wrapper that also tells torch.compile of its parts."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> "Wrapper":
        return Traceable(inner["held"])


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(16)


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(16), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def zero_tensor() -> torch.Tensor:
    """What forward-mode differentiation has where a tangent is zero: a tensor without memory."""
    return torch._efficientzerotensor(16)  # pyright: ignore[reportPrivateImportUsage]


def masked() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return masked_tensor(torch.ones(2), torch.tensor([True, False]))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse_coo": (lambda: torch.eye(4).to_sparse(), "torch.sparse_coo: call `to_dense()`"),
    "sparse_csr": (lambda: torch.eye(4).to_sparse_csr(), "torch.sparse_csr: call `to_dense()`"),
    "mkldnn": (lambda: torch.ones(4).to_mkldnn(), "_mkldnn: call `to_dense()`"),
    "nested": (nested, "a nested tensor"),
    "quantized": (quantized, "a quantized tensor: call `dequantize()`"),
    "meta": (lambda: torch.ones(4, device="meta"), "on the meta device"),
    "fake": (fake, "a FakeTensor"),
    "wrapper": (lambda: Wrapper(torch.ones(16)), "Wrapper"),
    "traceable": (lambda: Traceable(torch.ones(16)), "a wrapper subclass (Traceable)"),
    "wrapped_parameter": (lambda: torch.nn.Parameter(Wrapper(torch.ones(16))), "Wrapper"),
    "masked": (masked, "MaskedTensor"),
    "uninitialized": (torch.nn.parameter.UninitializedParameter, "UninitializedParameter"),
    "zero_tensor": (zero_tensor, "ZeroTensor"),
    "complex32": (lambda: torch.ones(4, dtype=torch.complex32), "dtype torch.complex32"),
    "float4": (
        lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "dtype torch.float4_e2m1fn_x2",
    ),
    "bits": (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "dtype torch.bits8"),
    "uint4": (
        lambda: torch.zeros(4, dtype=torch.uint8).view(torch.uint4),  # pyright: ignore[reportAttributeAccessIssue]
        "dtype torch.uint4",
    ),
    "numpy_object": (lambda: np.array([None, "a"]), "dtype object"),
    "numpy_text": (lambda: np.array(["a"]), "dtype <U1"),
    "numpy_time": (lambda: np.zeros(2, "M8[s]"), "dtype datetime64[s]"),
    "numpy_record": (lambda: np.zeros(2, [("a", "f4")]), "dtype [('a', '<f4')]"),
    "numpy_longdouble": (lambda: np.zeros(2, np.longdouble), "dtype float128"),
    "numpy_masked": (lambda: np.ma.masked_array([1.0], [True]), "MaskedArray"),
}


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_leaf_that_cannot_be_carried_is_named(kind: str, copy: bool | None):
    """The error is a TypeError with the leaf's path, what was got, and what to do."""
    make, got = REFUSED[kind]
    with pytest.raises(LeafTypeError, match="to_jax cannot carry") as error:
        to_jax({"ok": torch.ones(2), "bad": [make()]}, copy=copy)
    assert list(listed(error.value)) == ["['bad', '0']"]
    assert listed(error.value)["['bad', '0']"].startswith("got ")
    assert got in listed(error.value)["['bad', '0']"]


def test_one_error_lists_every_leaf():
    """All leaves of a tree that cannot be carried are listed, each with its path, and no other."""
    tree = {kind: [make(), torch.ones(1)] for kind, (make, _) in REFUSED.items()}
    with pytest.raises(LeafTypeError) as error:
        to_jax(tree)
    assert sorted(listed(error.value)) == sorted(f"['{kind}', '0']" for kind in REFUSED)


def test_nothing_is_converted_before_the_refusal():
    """A refused tree is left alone: its tensors were not exported, and can still be resized."""
    good = torch.zeros(4)
    with pytest.raises(LeafTypeError):
        to_jax({"a": good, "z": torch.eye(2).to_sparse()})
    good.resize_(1000)
    assert good.numel() == 1000


@pytest.fixture(scope="module")
def device_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A group of this one process."""
    file = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("placement", [Partial(), Partial("max")], ids=repr)
def test_a_partial_dtensor_is_refused_and_its_local_shard_crosses(device_mesh: Any, placement: Any):
    """What only a DTensor can be is named with its path and the call that helps."""
    partial = DTensor.from_local(torch.arange(16.0), device_mesh, [placement])
    td = TensorDict({"n": {"d": partial}, "p": torch.nn.Parameter(partial), "x": torch.ones(1)})
    with pytest.raises(LeafTypeError) as error:
        to_jax(td)
    assert listed(error.value) == dict.fromkeys(
        ["['n', 'd']", "['p']"],
        f"got {placement!r} on mesh axis 'mesh_dim_0', which JAX cannot spell: call "
        "dtensor.redistribute(placements=...) with Replicate() or Shard(dim) there first.",
    )
    assert to_jax(partial.to_local()).tolist() == list(range(16))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.vmap(f)(torch.ones(3, 16)),
        lambda f: torch.func.grad(f)(torch.ones(16)),
        lambda f: torch.func.jvp(f, (torch.ones(16),), (torch.ones(16),)),
    ],
    ids=["vmap", "grad", "jvp"],
)
def test_a_tensor_inside_a_torch_transformation_is_refused(transform: Callable[[Any], Any]):
    """Inside torch.func a tensor has no values of its own: it is named, as a tracer is in JAX."""
    errors = []

    def function(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(LeafTypeError) as error:
            to_jax({"x": x})
        errors.append(error.value)
        return x.sum()

    transform(function)
    assert [list(listed(error)) for error in errors] == [["['x']"]]


class Rows(LazyStackedTensorDict):
    """A stack of another kind, which may know more than its members."""


def mixed_stack() -> TensorDict:
    members = [NonTensorData("a", batch_size=[2]), NonTensorData("b", batch_size=[3])]
    return TensorDict({"w": torch.ones(2), "s": NonTensorStack(*members)}, [2])


NODES: dict[str, tuple[Callable[[], Any], str, str, Callable[[Any], Any]]] = {
    "stack_subclass": (
        lambda: Rows(*[TensorDict({"w": torch.ones(3)}) for _ in range(2)]),
        "",
        r"a Rows, a stack of another kind: call `.contiguous\(\)` first",
        lambda td: td.contiguous(),
    ),
    "sub_tensordict": (
        lambda: TensorDict({"w": torch.ones(2, 3)}, [2])._get_sub_tensordict(0),
        "",
        r"a _SubTensorDict, which is not carried as a tree: call `.contiguous\(\)`",
        lambda td: td.contiguous(),
    ),
    "non_tensor_stack": (
        mixed_stack,
        ", 's'",
        r"a NonTensorStack of batch size \[2, -1\], whose members differ",
        lambda td: td.set("s", NonTensorData(td.get("s").tolist(), batch_size=[2])),
    ),
}


@pytest.mark.parametrize("kind", NODES)
def test_a_tree_of_another_kind_is_named_and_the_advice_helps(kind: str):
    """A kind of TensorDict that is not carried is refused by path; what the error advises works."""
    make, key, message, cure = NODES[kind]
    node = make()
    with pytest.raises(LeafTypeError, match=f"got {message}"):
        to_jax(node)
    with pytest.raises(LeafTypeError, match=rf"^\['a', 'b', '0'{key}\]: got {message}"):
        to_jax({"a": {"b": [node]}})
    assert np.asarray(to_jax(cure(node))["w"]).min() == 1


@pytest.mark.parametrize("kind", ["wrapper", "masked", "uninitialized"])
def test_consolidate_refuses_the_same_tensors(kind: str):
    """What has no memory of its own cannot be copied into a buffer either."""
    td = TensorDict._new_unsafe({"x": REFUSED[kind][0]()}, batch_size=torch.Size([]))
    with pytest.raises(LeafTypeError, match=r"\['x'\]"):
        consolidate(td)
