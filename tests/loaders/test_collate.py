"""`collate` in one process: what a batch is, worked out with numpy and with stock's stack."""

import pickle
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from tdbridge import consolidate, to_jax
from tdbridge.loaders import collate
from tests import zoo
from tests.layout.check import assert_leaves_in_one_buffer, buffer_of
from tests.loaders.datasets import Pair, Point


def assert_padding_is_zero(batch: Any) -> None:
    used = np.zeros(len(buffer := buffer_of(batch)), bool)
    for leaf in zoo.leaves(batch).values():
        start = leaf.storage_offset() * leaf.itemsize
        used[start : start + leaf.nbytes] = True
    assert not buffer[~used].any()


# --- TensorDicts and tensorclasses


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_batch_holds_the_bits_of_its_samples(name):
    """Each leaf is numpy's stack of the samples', in one aligned buffer with zero padding."""
    batch = collate([zoo.TREES[name]() for _ in range(3)])
    leaves = zoo.leaves(batch)
    expected = zoo.expected(name)
    assert set(leaves) == set(expected)
    for path, array in expected.items():
        assert zoo.same_bits(zoo.as_numpy(leaves[path]), np.stack([array] * 3)), path
    assert_leaves_in_one_buffer(batch)
    if leaves:
        assert_padding_is_zero(batch)


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_batch_has_the_nodes_of_its_samples(name):
    """Class, batch size with the number of samples in front, names, keys; locked."""
    source = zoo.TREES[name]()
    batch = collate([zoo.TREES[name]() for _ in range(3)])
    nodes = zoo.nodes(batch)
    assert set(nodes) == set(zoo.nodes(source))
    for path, node in zoo.nodes(source).items():
        assert type(nodes[path]) is type(node)
        assert nodes[path].batch_size == (3, *node.batch_size)
        assert nodes[path].names == [None, *node.names]
        assert nodes[path].device == node.device
        assert list(nodes[path].keys()) == list(node.keys())
    assert batch.is_locked
    assert not source.is_locked


def test_samples_keep_their_order_and_are_not_changed():
    samples = [TensorDict(x=torch.full((2,), i), y={"z": torch.tensor(float(i))}) for i in range(5)]
    before = [sample.clone() for sample in samples]
    batch = collate(samples)
    assert batch["x"].tolist() == [[i, i] for i in range(5)]
    assert batch["y", "z"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert all((a == b).all() for a, b in zip(samples, before, strict=True))


def test_keys_may_stand_in_another_order():
    batch = collate([TensorDict(a=torch.ones(1), b=torch.zeros(1)),
                     TensorDict(b=torch.zeros(1), a=torch.ones(1))])  # fmt: skip
    assert batch["a"].tolist() == [[1.0], [1.0]]
    assert batch["b"].tolist() == [[0.0], [0.0]]


def test_gradients_are_not_carried():
    leaf = torch.ones(2, requires_grad=True)
    batch = collate([TensorDict(x=leaf), TensorDict(x=leaf * 2)])
    assert batch["x"].tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert not batch["x"].requires_grad


@pytest.mark.parametrize("name", ["lazy", "lazy_named", "lazy_inside", "lazy_of_lazy",
                                  "lazy_leafless", "values_in_two_dims"])  # fmt: skip
def test_what_has_no_columns_is_stacked_as_stock_does(name):
    samples = [zoo.KINDS[name]() for _ in range(2)]
    batch = collate(samples)
    assert zoo.described(batch) == zoo.described(torch.stack(samples))
    assert batch.is_consolidated()


@pytest.mark.parametrize("name", ["jagged", "jagged_transposed", "jagged_with_gaps"])
def test_jagged_samples_are_stacked_lazily(name):
    samples = [zoo.KINDS[name]() for _ in range(2)]
    batch = collate(samples)
    assert zoo.described(batch) == zoo.described(lazy_stack(samples))
    assert batch.is_consolidated()


def test_parameters_become_a_tensordict():
    batch = collate([zoo.params(), zoo.params()])
    assert type(batch) is TensorDict
    assert zoo.same_bits(zoo.as_numpy(batch["w"]), np.stack([zoo.as_numpy(zoo.params()["w"])] * 2))


def test_memory_mapped_samples_are_copied(tmp_path):
    td = TensorDict(x=torch.arange(6).reshape(3, 2), batch_size=[3]).memmap(tmp_path)
    batch = collate([td[2], td[0]])
    assert type(batch["x"]) is torch.Tensor
    assert batch["x"].tolist() == [[4, 5], [0, 1]]


# --- mappings


def test_a_mapping_becomes_a_tensordict():
    samples = [
        {"t": torch.full((2,), i), "deep": {"a": np.array([i, -i], "i2")}, "f8": np.float64(i)}
        for i in range(3)
    ]
    batch = collate(samples)
    assert type(batch) is TensorDict
    assert batch.batch_size == (3,)
    assert batch["deep"].batch_size == (3,)
    assert zoo.same_bits(zoo.as_numpy(batch["t"]), np.array([[0, 0], [1, 1], [2, 2]]))
    assert zoo.same_bits(
        zoo.as_numpy(batch["deep", "a"]), np.array([[0, 0], [1, -1], [2, -2]], "i2")
    )
    assert zoo.same_bits(zoo.as_numpy(batch["f8"]), np.array([0.0, 1.0, 2.0]))
    assert_leaves_in_one_buffer(batch)


@pytest.mark.parametrize("dtype", zoo.BOTH)
def test_arrays_of_every_dtype_keep_their_bits(dtype):
    made = [zoo.as_numpy(zoo.pattern(dtype, 3, 2) if i else zoo.pattern(dtype, 6).reshape(3, 2))
            for i in range(2)]  # fmt: skip
    batch = collate([{"x": array} for array in made])
    assert zoo.same_bits(zoo.as_numpy(batch["x"]), np.stack(made))


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([True, False], torch.bool, [True, False]),
        ([1, -(2**63)], torch.int64, [1, -(2**63)]),
        ([0.5, 0.25], torch.float32, [0.5, 0.25]),
        ([1j, 2.0 + 0j], torch.complex64, [1j, 2 + 0j]),
    ],
)
def test_python_numbers(values, dtype, expected):
    found = collate([{"x": value} for value in values])["x"]
    assert found.dtype == dtype
    assert found.tolist() == expected


def test_floats_are_of_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        assert collate([0.1, 0.2]).dtype == torch.float64
        assert collate([0.1j, 0.2j]).dtype == torch.complex128
    finally:
        torch.set_default_dtype(torch.float32)


def test_foreign_byte_order_is_the_same_dtype():
    batch = collate([{"x": np.array([1, 2], ">i4")}, {"x": np.array([3, 4], ">i4")}])
    assert batch["x"].dtype == torch.int32
    assert batch["x"].tolist() == [[1, 2], [3, 4]]


def test_a_sample_without_elements_and_one_without_leaves():
    assert collate([{"x": np.zeros((0, 3))}] * 2)["x"].shape == (2, 0, 3)
    assert collate([{}, {}]).batch_size == (2,)


def test_another_default_device_does_not_matter():
    with torch.device("meta"):
        batch = collate([{"x": 1, "y": np.ones(2)}])
    assert batch["x"].tolist() == [1]
    assert batch["x"].device.type == "cpu"


# --- non-tensor data


@pytest.mark.parametrize("value", ["text", None, [1, "a"], {1, 2}, ("a", 2), np.array(["a"]), b"x"])
def test_equal_values_stay_one(value):
    batch = collate([{"x": 1.0, "v": value} for _ in range(3)])
    assert not isinstance(batch.get("v"), NonTensorStack)
    found = batch.get("v").data
    assert type(found) is type(value)
    assert found == value


@pytest.mark.parametrize("values", [["a", "b"], [None, "b"], [[1], [2]], [{1}, {2}], ["1", b"1"]])
def test_unequal_values_are_one_per_sample(values):
    batch = collate([{"x": 1.0, "v": value} for value in values])
    stack = batch.get("v")
    assert isinstance(stack, NonTensorStack)
    assert [stack[i].data for i in range(2)] == values


def test_values_per_element_get_the_dimension_of_the_samples():
    samples = [
        TensorDict(x=torch.ones(2), v=NonTensorStack(f"a{i}", "b"), batch_size=[2])
        for i in range(3)
    ]
    batch = collate(samples)
    assert batch.get("v").batch_size == (3, 2)
    assert batch.get("v").tolist() == [["a0", "b"], ["a1", "b"], ["a2", "b"]]


def test_a_field_of_a_tensorclass_that_differs():
    batch = collate([Point(at=torch.ones(3), label=name, batch_size=[]) for name in "ab"])
    assert type(batch) is Point
    assert list(batch.label) == ["a", "b"]


# --- containers


@dataclass(frozen=True)
class Record:
    image: Any
    name: str


def test_containers_come_back_with_views_of_one_buffer():
    samples = [
        (torch.full((2,), i), [np.float32(i)], Pair(i, "a" * i), Record({"x": i}, "n"))
        for i in range(3)
    ]
    batch = collate(samples)
    assert [type(part) for part in batch] == [torch.Tensor, list, Pair, Record]
    tensor, (scalar,), (label, text), record = batch
    assert tensor.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert scalar.dtype == torch.float32
    assert scalar.tolist() == [0.0, 1.0, 2.0]
    assert label.tolist() == [0, 1, 2]
    assert text == ["", "a", "aa"]
    assert type(record.image) is TensorDict
    assert record.image["x"].tolist() == [0, 1, 2]
    assert record.name == ["n"] * 3
    leaves = [tensor, scalar, label, record.image["x"]]
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == 1
    assert all(leaf.data_ptr() % 64 == 0 for leaf in leaves)
    assert samples[0][3].name == "n"


@pytest.mark.parametrize(
    ("samples", "dtype", "expected"),
    [
        ([torch.ones(2), torch.zeros(2)], torch.float32, [[1.0, 1.0], [0.0, 0.0]]),
        ([np.ones(2, ml_dtypes.bfloat16)] * 2, torch.bfloat16, [[1.0, 1.0]] * 2),
        ([3, 4], torch.int64, [3, 4]),
        ([np.uint8(3), np.uint8(4)], torch.uint8, [3, 4]),
    ],
)
def test_bare_values(samples, dtype, expected):
    batch = collate(samples)
    assert type(batch) is torch.Tensor
    assert batch.dtype == dtype
    assert batch.tolist() == expected


def test_bare_non_tensors_are_a_list():
    assert collate(["a", "a"]) == ["a", "a"]
    assert collate([(), ()]) == ()


# --- batches that are batches already


@pytest.mark.parametrize("name", zoo.TREES)
def test_a_batch_is_consolidated(name):
    tree = zoo.TREES[name]()
    batch = collate(tree)
    assert_leaves_in_one_buffer(batch)
    assert batch is not tree
    assert collate(batch) is batch


def test_a_consolidated_batch_is_returned_itself():
    tree = consolidate(zoo.nested())
    assert collate(tree) is tree


def test_leaves_that_lie_in_their_buffer_are_declared_so_again():
    """As Grain leaves a batch of its workers: taken apart and put together."""
    tree = consolidate(zoo.nested())
    apart = jax.tree.map(lambda leaf: leaf, tree)
    apart.unlock_()
    assert not apart.is_consolidated()
    address = buffer_of(tree).ctypes.data
    again = collate(apart)
    assert again is apart
    assert again.is_consolidated()
    assert buffer_of(again).ctypes.data == address


@pytest.mark.parametrize("name", ["strided", "flat"])
def test_leaves_elsewhere_are_copied(name):
    tree = zoo.TREES[name]()
    assert not {leaf.data_ptr() for leaf in zoo.leaves(collate(tree)).values()} & {
        leaf.data_ptr() for leaf in zoo.leaves(tree).values()
    }


# --- what is done with it


def test_jax_shares_the_batch():
    batch = collate([{"x": np.full(2, i, np.float32), "n": np.int32(i)} for i in range(4)])
    shared = to_jax(batch, copy=False)
    assert shared["x"].unsafe_buffer_pointer() == batch["x"].data_ptr()
    packed = to_jax(batch, packed=True)
    assert packed["n"].tolist() == [0, 1, 2, 3]
    assert {segment.unsafe_buffer_pointer() for segment in packed.segments} == {
        leaf.data_ptr() for leaf in zoo.leaves(batch).values()
    }


def test_it_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(collate)) is collate
