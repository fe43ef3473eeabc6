"""What consolidate does not carry: an error that names the leaf and says what to do."""

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    UnbatchedTensor,
    lazy_stack,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import tdbridge
from tdbridge import cast, consolidate
from tdbridge.errors import LeafTypeError
from tests import zoo


def quiet(make: Callable[[], Any]) -> Any:
    """torch announces that nested, CSR and quantized tensors are prototypes or on their way out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


def nested() -> torch.Tensor:
    return quiet(lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]))


def quantized() -> torch.Tensor:
    return quiet(lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8))


LEAVES: dict[str, tuple[Callable[[], Any], str]] = {
    "coo": (lambda: torch.eye(3).to_sparse(), "layout torch.sparse_coo: call `to_dense()`"),
    "csr": (lambda: quiet(lambda: torch.eye(3).to_sparse_csr()), "layout torch.sparse_csr"),
    "strided nested": (nested, "nested tensor"),
    "quantized": (quantized, "quantized tensor: call `dequantize()`"),
    "meta": (lambda: torch.zeros(3, device="meta"), "on the meta device, which holds no values"),
    "fake": (fake, "a FakeTensor, which holds no values"),
}


@pytest.mark.parametrize("kind", LEAVES)
def test_a_leaf_that_is_no_dense_block_is_refused(kind):
    """Sparse, nested, quantized, valueless tensors raise; the error has the path and a remedy."""
    make, message = LEAVES[kind]
    td = TensorDict({"x": torch.zeros(3), "n": {"bad": make()}})
    with pytest.raises(LeafTypeError, match=r"^\['n', 'bad'\]: got .*" + re.escape(message)):
        consolidate(td)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.HashStore()  # type: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_dtensor_over_no_dense_shard_is_refused():
    """The shard lies in the buffer, so it is the shard that has to be dense."""
    mesh = init_device_mesh("cpu", (1,))
    leaf = DTensor.from_local(torch.zeros(3, device="meta"), mesh, [Replicate()])
    message = "['n', 'bad']: got a tensor on the meta device, which holds no values"
    with pytest.raises(LeafTypeError, match="^" + re.escape(message)):
        consolidate(TensorDict({"n": {"bad": leaf}}))


@pytest.mark.usefixtures("group")
def test_a_dtensor_is_refused_where_plain_tensors_are_filled():
    """`cast(td, out=c)` writes to plain tensors; the error says how to get the shard."""
    mesh = init_device_mesh("cpu", (1,))
    leaf = DTensor.from_local(torch.zeros(3), mesh, [Replicate()])
    message = "['n', 'bad']: got a DTensor: pass its local shard, `to_local()`, or `full_tensor()`"
    out = consolidate(TensorDict({"n": {"bad": torch.zeros(3)}}))
    with pytest.raises(LeafTypeError, match="^" + re.escape(message)):
        cast(TensorDict({"n": {"bad": leaf}}), torch.bfloat16, out=out)


@pytest.mark.parametrize(
    "array",
    [jnp.zeros(3), jnp.zeros(3, jnp.float8_e5m2), np.zeros(3, ml_dtypes.bfloat16)],
    ids=["jax", "jax float8", "bfloat16"],
)
def test_an_array_that_tensordict_took_for_a_non_tensor_is_refused(array):
    """tensordict swallows jax and ml_dtypes arrays as NonTensorData: that is said aloud."""
    td = TensorDict({"n": {}})
    td["n", "bad"] = array
    assert isinstance(td.get(("n", "bad")), NonTensorData)
    with pytest.raises(LeafTypeError, match=r"^\['n', 'bad'\]: got a .*to_torch"):
        consolidate(td)
    assert consolidate(tdbridge.to_torch(td))["n", "bad"].tolist() == [0, 0, 0]


def test_an_arraydict_is_refused():
    """Its arrays are no tensors; the error says how to convert them."""
    with pytest.raises(LeafTypeError, match=re.escape("tdbridge.to_torch")):
        consolidate(tdbridge.to_jax(zoo.flat()))


def test_an_unbatched_tensor_is_refused():
    """A leaf that does not follow the batch size would come back as one that has to."""
    td = TensorDict({"x": torch.zeros(4), "n": {"bad": UnbatchedTensor(torch.zeros(3))}}, [4])
    with pytest.raises(LeafTypeError, match=r"\['n', 'bad'\]: got .*UnbatchedTensor"):
        consolidate(td)


class Rows(LazyStackedTensorDict):
    """A stack of another kind, which may know more than its members."""


NODES: dict[str, tuple[Callable[[], Any], str]] = {
    "_SubTensorDict": (
        lambda: zoo.flat()._get_sub_tensordict(0),
        "a _SubTensorDict, which is not carried as a tree: call `.contiguous()`",
    ),
    "Rows": (
        lambda: Rows(zoo.no_batch(), zoo.no_batch()),
        "a Rows, a stack of another kind: call `.contiguous()` first",
    ),
    "Step": (
        lambda: lazy_stack([zoo.tensorclass(), zoo.tensorclass()]),
        "a lazy stack of a tensorclass: call `.contiguous()` first",
    ),
}


@pytest.mark.parametrize("kind", NODES)
def test_a_node_of_another_kind_is_refused(kind):
    """The error names where it is and what it is; its advice works."""
    make, message = NODES[kind]
    tree = TensorDict({"n": {"bad": make()}})
    with pytest.raises(LeafTypeError, match=rf"^\['n', 'bad'\]: got {re.escape(message)}"):
        consolidate(tree)
    with pytest.raises(LeafTypeError, match=f"^got {re.escape(message)}"):
        consolidate(make())
    assert consolidate(make().contiguous()).is_consolidated()


def test_a_bare_non_tensor_is_refused():
    """NonTensorData is an entry of a tree and no tree: its value is not dropped."""
    with pytest.raises(LeafTypeError, match="NonTensorData"):
        consolidate(NonTensorData("value"))


@pytest.mark.parametrize("tree", [{"a": torch.zeros(2)}, torch.zeros(2), None, [torch.zeros(2)]])
def test_what_is_no_tree_is_refused(tree):
    """Dicts and bare tensors raise; the error says what is expected."""
    with pytest.raises(LeafTypeError, match="expected a TensorDict, a tensorclass"):
        consolidate(tree)


def test_a_bad_leaf_among_many_leaves_nothing_behind(tmp_path):
    """No file is begun before the leaves are checked."""
    with pytest.raises(LeafTypeError):
        consolidate(TensorDict({"bad": torch.zeros(3, device="meta")}), filename=tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_vmap_does_not_write_into_a_batched_leaf():
    """Inside torch.vmap a leaf has no memory of its own, so consolidating raises there."""
    with pytest.raises((LeafTypeError, RuntimeError)):
        torch.vmap(consolidate)(zoo.flat())
