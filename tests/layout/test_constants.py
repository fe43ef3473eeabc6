"""Non-tensor values: equality, hash, digest and JSON."""

import copy
import itertools
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from tdbridge.errors import LayoutError
from tdbridge.layout.constants import Constant
from tests import zoo
from tests.layout import values
from tests.layout.check import assert_same_value

ALL = [*values.PLAIN, *values.OPAQUE]


def numbered(items: list[Any]) -> list[Any]:
    """Parameters whose names do not depend on the order of a set."""
    return [pytest.param(item, id=f"{i}-{type(item).__name__}") for i, item in enumerate(items)]


def test_constants_differ_when_type_or_content_differs():
    """No two of these values are equal, however close: 1, 1.0, True and numpy's 1 are four."""
    for left, right in itertools.combinations(ALL, 2):
        assert Constant(left) != Constant(right), (left, right)
        assert Constant(left).token != Constant(right).token, (left, right)


def test_a_copy_is_equal():
    """A value and its deep copy are equal, have equal hashes and find each other in a dict."""
    for value in ALL:
        other = copy.deepcopy(value)
        assert Constant(other) == Constant(value)
        assert hash(Constant(other)) == hash(Constant(value))
        assert {Constant(value): 1}[Constant(other)] == 1


def test_a_pickled_constant_is_equal():
    """A constant comes back equal from a pickle, its digest computed anew or not."""
    for value in [*values.OPAQUE, *values.UNSTABLE]:
        constant = Constant(value)
        assert pickle.loads(pickle.dumps(constant)).token == constant.token
        assert pickle.loads(pickle.dumps(constant)) == Constant(value)


@pytest.mark.parametrize(
    ("left", "right"),
    [pytest.param(left, right, id=name) for name, left, right in values.build_equal()],
)
def test_what_does_not_count(left, right):
    """How a value was made, its strides, its byte order and its object identities do not count."""
    assert Constant(left) == Constant(right)
    assert Constant(left).token == Constant(right).token


def test_json_gives_the_value_back():
    """Through JSON text the value comes back in its type and in every bit."""
    for value in values.PLAIN:
        _assert_json_gives_back(value)


def _assert_json_gives_back(value: Any) -> None:
    found = Constant.from_json(json.loads(json.dumps(Constant(value).to_json())))
    assert found == Constant(value)
    assert type(found.value) is type(value)
    if isinstance(value, torch.Tensor):
        assert zoo.same_bits(zoo.as_numpy(found.value), zoo.as_numpy(value))
    elif isinstance(value, float):
        assert found.value == value or (math.isnan(found.value) and math.isnan(value))
        assert math.copysign(1, found.value) == math.copysign(1, value)
    elif not isinstance(value, (complex, np.generic)):
        assert_same_value(found.value, value)


@pytest.mark.parametrize("value", numbered(values.OPAQUE))
def test_what_json_cannot_express_is_refused(value):
    """Objects raise, also deep inside a list, and the error names their type and what goes."""
    for holder in (value, [{"k": (value,)}]):
        with pytest.raises(LayoutError, match=f"of type {type(value).__name__}, which has no JSON"):
            Constant(holder).to_json()


def test_what_to_json_writes_from_json_reads():
    """A value whose dtype the table lacks is refused when it is written, not when it is read."""
    with pytest.raises(LayoutError, match=r"longdouble|float128"):
        Constant(np.longdouble(1)).to_json()


@pytest.mark.parametrize("mask", [[False, True], [True, False]])
def test_a_masked_array_keeps_its_mask(mask):
    """The mask of a masked array counts, and JSON, which has none for it, does not drop it."""
    masked = np.ma.MaskedArray([1, 2], mask=mask)
    assert Constant(masked) != Constant(np.ma.MaskedArray([1, 2], mask=[False, False]))
    assert Constant(masked) != Constant(np.array([1, 2]))
    with pytest.raises(LayoutError, match="MaskedArray"):
        Constant(masked).to_json()


@pytest.mark.parametrize(
    "value",
    [torch.eye(2).to_sparse(), torch.zeros(2, device="meta")],
    ids=["sparse", "meta"],
)
def test_a_tensor_without_plain_bytes_is_an_opaque_value(value):
    """A sparse or meta tensor has a digest but no JSON form."""
    assert len(Constant(value).token) == 64
    with pytest.raises(LayoutError, match="has no JSON form"):
        Constant(value).to_json()


def test_an_object_without_a_pickle_is_equal_to_itself_alone():
    """Identity is what is left to compare."""
    first, second = (lambda: 1), (lambda: 1)
    assert Constant(first) == Constant(first)
    assert Constant(first) != Constant(second)


def test_a_constant_is_not_equal_to_its_value():
    """A constant and a bare value are different things."""
    assert Constant(1) != 1
    assert repr(Constant([1])) == "Constant([1])"


def test_json_is_what_the_value_was_when_it_was_compared():
    """A later change in place does not reach what equality has been decided on."""
    value = [1, 2]
    constant = Constant(value)
    assert constant == Constant([1, 2])
    value.append(3)
    assert Constant.from_json(constant.to_json()) == constant


def test_the_digest_is_equal_in_every_process(elsewhere):
    """Ranks compare digests, so neither the hash seed nor the process goes into one."""
    assert elsewhere["tokens"] == [Constant(value).token for value in values.UNSTABLE]
