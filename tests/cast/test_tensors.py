"""Small tensors are cast many at once, large ones alone: what that must not change."""

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdbridge import cast, consolidate
from tests import zoo

QUIET = 0x7FC0  # the one NaN of bfloat16, written out


def with_nan(shape: tuple[int, ...], at: int) -> torch.Tensor:
    """Small numbers, which bfloat16 holds exactly, and one NaN with its sign and a payload."""
    values = (np.arange(np.prod(shape)) % 251).astype(np.float32)
    values.view(np.uint32)[at] = 0xFFC12345
    return torch.from_numpy(values.reshape(shape))


def assert_cast(got: torch.Tensor, old: torch.Tensor) -> None:
    """bfloat16 is the upper half of float32, but for NaN."""
    halves = old.contiguous().numpy().view(np.uint32) >> 16
    halves[np.isnan(old.contiguous().numpy())] = QUIET
    assert np.array_equal(zoo.as_numpy(got).view(np.uint16), halves.astype(np.uint16))


@pytest.mark.parametrize("shapes", [[(3,)] * 4, [(2, 3)] * 4, [(3,), (5,), ()], [(0,)] * 2])
@pytest.mark.parametrize("more", [[], [(5000,)]])
def test_each_leaf_has_memory_of_its_own(shapes: Any, more: Any):
    """Equal small leaves, unequal ones, and large ones among them."""
    leaves = [torch.ones(shape) for shape in shapes + more]
    got = cast(leaves, torch.bfloat16)
    assert [(x.shape, x.storage_offset()) for x in got] == [(x.shape, 0) for x in leaves]
    assert [x.untyped_storage().nbytes() for x in got] == [2 * x.numel() for x in leaves]
    assert all((x == 1).all() for x in got)


def test_a_cast_leaf_is_no_view():
    """An operand that asks for a gradient may be multiplied into it."""
    got = cast([torch.ones(3), torch.ones(3)], torch.bfloat16)
    got[0].mul_(torch.ones(3, requires_grad=True)).float().sum().backward()
    assert [x._is_view() for x in got] == [False, False]


def test_strides_stay():
    """A leaf that is dense in another order than by rows keeps it, as by `Tensor.to`."""
    leaves = [torch.ones(2, 3).t(), torch.ones(2, 3).t()]
    assert [x.stride() for x in cast(leaves, torch.bfloat16)] == [(1, 3)] * 2


def test_leaves_of_several_dtypes_become_one():
    """They have one shape, but no stack of them may be promoted on the way."""
    leaves = [torch.tensor([x]).to(d) for d in (torch.float64, torch.float16) for x in (1 / 3, 2.0)]
    got = cast(leaves, torch.float32)
    expected = [np.float32(x.numpy()[0]) for x in leaves]
    assert [x.dtype for x in got] == [torch.float32] * 4
    assert [x.item() for x in got] == expected


@pytest.mark.parametrize("shape", [(4, 7), (4000,), (5000,), (2**20,)])
@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("whole", [False, True])
def test_nan_is_found_wherever_it_is(shape: tuple[int, ...], at: int, whole: bool):
    """In a small leaf and in a large one, first and last; padding follows each in a buffer."""
    td = TensorDict({f"x{i}": with_nan(shape, at if i == 1 else 0) for i in range(3)})
    got = cast(consolidate(td) if whole else td, torch.bfloat16)
    for key, old in zoo.leaves(td).items():
        assert_cast(got[key], old)
