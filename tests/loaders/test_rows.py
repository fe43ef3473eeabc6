"""`Rows`: a TensorDict's rows one by one and by the batch, against stock's own indexing."""

import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from tdbridge import LayoutError, LeafTypeError, consolidate
from tdbridge.loaders import Rows, collate
from tests import zoo
from tests.layout.check import assert_leaves_in_one_buffer

BATCHED = [name for name, make in zoo.TREES.items() if make().batch_size]
INDICES = [1, 0, -1, 1, 1]


def made(name: str, how: str, folder: Any) -> Any:
    tree = zoo.TREES[name]()
    if how == "memory-mapped":
        return tree.memmap(folder)
    return consolidate(tree) if how == "consolidated" else tree


@pytest.mark.parametrize("name", [n for n in BATCHED if n != "zero_batch"])
@pytest.mark.parametrize("how", ["plain", "consolidated"])
def test_a_batch_holds_the_rows(name, how, tmp_path):
    rows = Rows(made(name, how, tmp_path))
    batch = rows.__getitems__(INDICES)
    for path, array in zoo.expected(name).items():
        assert zoo.same_bits(zoo.as_numpy(zoo.leaves(batch)[path]), array[INDICES]), path
    assert_leaves_in_one_buffer(batch)
    source = zoo.TREES[name]()
    assert type(batch) is type(source)
    assert batch.batch_size == (5, *source.batch_size[1:])
    assert batch.names == source.names
    assert batch.is_locked
    assert collate(batch) is batch


@pytest.mark.parametrize("name", ["flat", "nested", "tensorclass", "all_dtypes", "non_tensors"])
def test_the_rows_of_a_memory_mapped_tree(name, tmp_path):
    rows = Rows(zoo.TREES[name]().memmap(tmp_path))
    batch = rows.__getitems__(INDICES)
    assert {type(leaf) for leaf in zoo.leaves(batch).values()} == {torch.Tensor}
    for path, array in zoo.expected(name).items():
        assert zoo.same_bits(zoo.as_numpy(zoo.leaves(batch)[path]), array[INDICES]), path
    assert_leaves_in_one_buffer(batch)


@pytest.mark.parametrize("name", ["lazy", "lazy_named", "lazy_inside", "values_per_element",
                                  "values_in_two_dims", "jagged"])  # fmt: skip
def test_what_is_not_gathered_is_indexed_as_stock_does(name):
    tree = zoo.KINDS[name]()
    batch = Rows(tree).__getitems__([1, 0, 1])
    assert zoo.described(batch) == zoo.described(consolidate(tree[torch.tensor([1, 0, 1])]))
    assert batch.is_consolidated()


@pytest.mark.parametrize("name", [n for n in BATCHED if n != "zero_batch"])
def test_a_row_is_that_of_stock(name):
    tree = zoo.TREES[name]()
    rows = Rows(tree)
    for i in (0, 1, -1, np.int64(1)):
        assert zoo.described(rows[i]) == zoo.described(tree[int(i)])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("indices", [np.array([2, 0]), torch.tensor([2, 0]), np.array([2, 0], "u1"),
                                     [np.int32(2), 0], (2, 0), range(2, -1, -2)])  # fmt: skip
def test_indices_of_every_kind(indices):
    rows = Rows(TensorDict(x=torch.arange(3), batch_size=[3]))
    assert rows.__getitems__(indices)["x"].tolist() == [2, 0]


def test_a_batch_of_no_rows():
    batch = Rows(zoo.flat()).__getitems__([])
    assert batch.batch_size == (0,)
    assert batch["b"].shape == (0, 3)
    assert len(Rows(zoo.zero_batch())) == 0


def test_the_length_is_that_of_the_first_batch_dimension():
    assert len(Rows(zoo.deeper_batch())) == 2
    assert Rows(zoo.deeper_batch()).__getitems__([1])["inner"].batch_size == (1, 5)


def test_writes_to_the_tensors_are_seen_and_the_tree_is_left_as_it_was():
    td = zoo.flat()
    rows = Rows(td)
    td["a"][1] = 77
    assert not td.is_locked
    assert rows.__getitems__([1])["a"].item() == 77
    td["a"] = torch.zeros(4, dtype=torch.int32)
    assert rows[1]["a"].item() == 77
    assert rows.__getitems__([1])["a"].item() == 77


def test_batches_share_nothing_with_the_tree_nor_with_each_other():
    td = zoo.flat()
    rows = Rows(td)
    first, second = rows.__getitems__([0, 1]), rows.__getitems__([0, 1])
    first["b"].zero_()
    assert second["b"].any()
    assert td["b"][:2].all()


def test_gradients_are_not_carried():
    td = TensorDict(x=torch.ones(3, 2, requires_grad=True), batch_size=[3])
    assert not Rows(td).__getitems__([1, 2])["x"].requires_grad


@pytest.mark.parametrize("index", [3, -4])
def test_a_row_out_of_range(index):
    rows = Rows(TensorDict(x=torch.arange(3), batch_size=[3]))
    with pytest.raises(IndexError, match=re.escape(f"got row {index} of 3.")):
        rows[index]
    with pytest.raises(IndexError, match=re.escape(f"got row {index} of 3.")):
        rows.__getitems__([0, index])


@pytest.mark.parametrize("indices", [[0.5], [True], [[0]], ["a"]])
def test_indices_that_are_none(indices):
    with pytest.raises(IndexError, match="expected a list of integers"):
        Rows(zoo.flat()).__getitems__(indices)


def test_what_has_no_rows():
    with pytest.raises(LayoutError, match="got a TensorDict without batch dimensions"):
        Rows(zoo.no_batch())
    for value in ({"x": 1}, torch.ones(3), NonTensorStack("a", "b"), None):
        with pytest.raises(LeafTypeError, match="expected a TensorDict or a tensorclass with rows"):
            Rows(value)


def test_it_is_pickled_without_what_it_remembers():
    rows = Rows(zoo.nested())
    rows.__getitems__([0, 1])
    again = pickle.loads(pickle.dumps(rows))
    assert zoo.described(again.__getitems__([3, 1])) == zoo.described(rows.__getitems__([3, 1]))
    assert len(pickle.dumps(rows)) == len(pickle.dumps(Rows(zoo.nested())))


def test_it_has_no_state_of_its_own():
    """StatefulDataLoader would save that of a dataset, which is the whole data of a TensorDict."""
    assert not hasattr(Rows(zoo.flat()), "state_dict")


def test_its_name_tells_the_structure_and_not_the_place():
    """Grain compares it with that of the dataset that a state was saved of."""
    assert repr(Rows(zoo.flat())) == repr(Rows(zoo.flat()))
    assert repr(Rows(zoo.flat())) != repr(Rows(zoo.nested()))
    assert repr(Rows(zoo.flat())).startswith("Rows(4 rows, layout ")
