"""Indexing over the batch dimensions: stock TensorDict is the oracle, names included."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import tdbridge
from tdbridge import ArrayDict
from tests import zoo

ALL = slice(None)
NAMES = ("x", "y", "z")
SIZES = (2, 3, 4)


def tree(rank: int) -> TensorDict:
    """Leaves of several event ranks, a nested tree with no leaf, and a deeper one."""
    size = SIZES[:rank]
    td = TensorDict({"n": {"e": {}}}, size, names=list(NAMES[:rank]))
    td["leaf0"] = zoo.pattern("int32", *size)
    td["n", "leaf1"] = zoo.pattern("int32", *size, 5)
    td["deeper"] = TensorDict({"d": zoo.pattern("int32", *size, 2)}, [*size, 2])
    return td


STOCK = {rank: tree(rank) for rank in range(4)}
OURS = {rank: tdbridge.to_jax(td) for rank, td in STOCK.items()}
NUMPY = {rank: jax.tree.map(np.asarray, ad) for rank, ad in OURS.items()}


def for_stock(index: Any) -> Any:
    """The same index with tensors for arrays."""
    if isinstance(index, tuple):
        return tuple(map(for_stock, index))
    return torch.from_numpy(np.asarray(index)) if isinstance(index, np.ndarray) else index


def check(ours: ArrayDict, stock: TensorDict) -> None:
    """Every value, every batch size, every name is that of stock."""
    for path, expected in zoo.leaves(stock).items():
        np.testing.assert_array_equal(ours[path], expected.numpy(), err_msg=str(path))
    for path, node in zoo.nodes(stock).items():
        found = ours[path] if path else ours
        assert found.batch_size == tuple(node.batch_size), path
        if path != ("deeper",):
            assert found.names == node.names, path


MASK = np.array([[True, False, True], [False, True, True]])
PAIR = np.array([[0, 1], [1, 0]])
INDICES = [
    (0, ()),
    (0, ...),
    (0, True),
    (1, 0),
    (1, np.int64(1)),
    (1, ALL),
    (1, [1, 0, 1]),
    (1, []),
    (1, range(2)),
    (1, [True, False]),
    (1, np.array([-1, 0])),
    (1, np.array(1)),
    (1, np.array([], dtype=int)),
    (1, np.array([False, False])),
    (1, PAIR),
    (1, [[0, 1], [1, 1]]),
    (1, ...),
    (1, True),
    (1, False),
    (1, (None, [1])),
    (2, (..., 1)),
    (2, (None, ..., None)),
    (2, (None, 1, None, ALL)),
    (2, (ALL, [2, 0])),
    (2, ([1, 1], slice(1, 3))),
    (2, ([0, 1], [1, 2])),
    (2, ([0, 1], 2)),
    (2, ([0, 1], None, [0, 1])),
    (2, (None, [0, 1], [0, 1])),
    (2, MASK),
    (2, MASK[:, 0]),
    (2, (ALL, MASK[0])),
    (2, (MASK[:, 0], MASK[0, :1].repeat(3))),
    (2, (None, MASK)),
    (2, (True, 0)),
    (2, (0, True)),
    (3, (0, ..., 3)),
    (3, (0, ALL, [1, 0])),
    (3, (0, ALL, [1])),
    (3, ([1, 0], ALL, 1)),
    (3, ([0, 1], ALL, [0, 1])),
    (3, (ALL, [0, 1], [0, 1])),
    (3, ([0, 1], [0, 1])),
    (3, (ALL, 0, [1, 1])),
    (3, (MASK, 0)),
    (3, (MASK, None)),
    (3, (MASK, [0])),
    (3, (PAIR, 0)),
    (3, (PAIR, ALL, 0)),
    (3, (ALL, PAIR)),
    (3, (np.array(0), [1, 1])),
    (3, (np.array(0), ALL, [1, 1])),
    (3, ([0], ..., [0])),
    (3, (..., None, [0])),
]


@pytest.mark.parametrize(("rank", "index"), INDICES)
def test_an_index_gives_what_stock_gives(rank, index):
    """Ints, slices, lists, arrays, masks, None and ... select over the batch as on a TensorDict."""
    check(OURS[rank][index], STOCK[rank][for_stock(index)])


@st.composite
def indices(draw: st.DrawFn, rank: int) -> tuple[Any, ...]:
    """A tuple of indices for the leading dimensions of a tree of `rank` batch dimensions."""
    items: list[Any] = []
    length = draw(st.integers(0, 3))
    dims = list(SIZES[:rank])[: draw(st.integers(0, rank))]
    for size in dims:
        at = st.integers(-size, size - 1)
        bound = st.none() | st.integers(-size - 1, size + 1)
        items.append(
            draw(
                st.one_of(
                    at,
                    st.builds(slice, bound, bound, st.none() | st.integers(1, 3)),
                    st.lists(at, min_size=length, max_size=length).map(lambda v: np.array(v, int)),
                )
            )
        )
        items += [None] * draw(st.integers(0, 1))
    if draw(st.booleans()):
        items.append(...)
    return tuple(items)


@given(rank=st.integers(0, 3), data=st.data())
def test_any_mixture_of_indices_gives_what_stock_gives(rank, data):
    """Ints, slices, arrays, None and a trailing ellipsis in any combination."""
    index = data.draw(indices(rank))
    check(NUMPY[rank][index], STOCK[rank][for_stock(index)])


@given(
    steps=st.lists(st.sampled_from([1, -1, 2, -2, -3]), min_size=1, max_size=3),
    data=st.data(),
)
def test_negative_steps_are_numpys(steps, data):
    """What torch cannot do, numpy is the oracle for: slices that run backwards."""
    index = tuple(
        slice(
            data.draw(st.none() | st.integers(-5, 5)), data.draw(st.none() | st.integers(-5, 5)), s
        )
        for s in steps
    )
    ours = NUMPY[3][index]
    for path, tensor in zoo.leaves(STOCK[3]).items():
        np.testing.assert_array_equal(ours[path], tensor.numpy()[index])
    assert ours.names == list(NAMES)


@pytest.mark.parametrize(
    ("rank", "index", "message"),
    [
        (1, 2, "index 2 is out of bounds for batch dim 0 of size 2"),
        (1, -3, "index -3 is out of bounds for batch dim 0 of size 2"),
        (2, (0, 3), "index 3 is out of bounds for batch dim 1 of size 3"),
        (2, (..., 3), "index 3 is out of bounds for batch dim 1 of size 3"),
        (2, (None, 2), "index 2 is out of bounds for batch dim 0 of size 2"),
        (1, [0, 2], "index 2 is out of bounds for batch dim 0 of size 2"),
        (1, np.array([-3]), "index -3 is out of bounds for batch dim 0 of size 2"),
        (1, np.array(2), "index 2 is out of bounds for batch dim 0 of size 2"),
        (2, (ALL, [0, 7]), "index 7 is out of bounds for batch dim 1 of size 3"),
        (2, (0, 0, 0), "too many indices for batch_size [2, 3]: got 3"),
        (0, 0, "too many indices for batch_size []: got 1"),
        (1, MASK, "too many indices for batch_size [2]: got 2"),
        (2, (..., 0, ...), "an index can have only a single ellipsis, got 2"),
        (1, np.array([True, False, True]), "boolean index did not match"),
    ],
)
def test_an_index_beyond_the_batch_is_an_index_error(rank, index, message):
    """Nothing is clamped and no event dimension is indexed: the error says what there is."""
    with pytest.raises((IndexError, RuntimeError)):
        STOCK[rank][for_stock(index)]
    with pytest.raises(IndexError, match=re.escape(message)):
        OURS[rank][index]


@pytest.mark.parametrize("index", [1.0, np.array([0.5]), {1}, {"a": 1}, ["obs", "x"]])
def test_what_is_no_index_is_refused(index):
    """A float, a set, a dict or a list of keys is an IndexError or a TypeError, as in stock."""
    with pytest.raises((IndexError, TypeError)):
        OURS[1][index]


def test_indexing_is_traceable():
    """An index that jit does not know selects at run time, also beside known ones."""
    ad = OURS[3]
    pick = jax.jit(lambda tree, i, many: (tree[i], tree[i, :, many], tree[..., i]))
    one, some, last = pick(ad, 1, jnp.array([3, 0]))
    leaf = STOCK[3]["n", "leaf1"].numpy()
    np.testing.assert_array_equal(one["n", "leaf1"], leaf[1])
    np.testing.assert_array_equal(some["n", "leaf1"], leaf[1][:, [3, 0]])
    np.testing.assert_array_equal(last["n", "leaf1"], leaf[..., 1, :])
    assert (one.names, some.names, last.names) == (["y", "z"], ["y", "z"], ["x", "y"])
    assert one["n", "e"].batch_size == (3, 4)


@pytest.mark.parametrize("index", [0, [1, 0], slice(1, None), None])
def test_numpy_leaves_stay_numpy(index):
    """A tree of numpy arrays is indexed by numpy: 64-bit values stay, and slices are views."""
    leaf = np.array([2**40, -(2**41)])
    found = ArrayDict({"x": leaf}, [2])[index]["x"]
    np.testing.assert_array_equal(found, leaf[index], strict=True)
    assert not isinstance(found, jax.Array)


def test_indexing_keeps_class_and_non_tensor_entries():
    """A row of a tensorclass is one of the same class, with the same non-tensor values."""
    row = tdbridge.to_jax(zoo.tensorclass())[0]
    assert row.tensorclass is zoo.Step
    assert row["after"].tensorclass is zoo.Step
    assert (row.label, row.after.label) == ("now", "after")
