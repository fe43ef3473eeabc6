"""What `collate` refuses: each error names the leaf, the sample and what to do."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdbridge import LayoutError, LeafTypeError
from tdbridge.loaders import collate
from tests import zoo

ALIKE = "Make them alike in the dataset: nothing is cast here."
PAD = "Pad them to one shape, or make each sample's a jagged tensor."


def td(**leaves: Any) -> TensorDict:
    return TensorDict(leaves)  # pyright: ignore[reportArgumentType]


def differ(where: str, index: int, what: str, first: str, advice: str = ALIKE) -> str:
    return f"{where}sample {index} has {what}, sample 0 has {first}. {advice}"


F2, D2 = "a tensor of float32[2]", "a tensor of float64[2]"
TWO, NONE = [2], []


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "got no samples, of which no batch can be made."),
        (
            [td(x=torch.ones(2)), td(x=torch.ones(2)), td(x=torch.ones(3))],
            differ("['x']: ", 2, "a tensor of float32[3]", F2, PAD),
        ),
        (
            [{"a": {"x": np.ones(2)}}, {"a": {"x": np.ones((2, 1))}}],
            differ(
                "['a', 'x']: ",
                1,
                "a numpy array of float64[2, 1]",
                "a numpy array of float64[2]",
                PAD,
            ),
        ),
        ([td(x=torch.ones(2)), td(x=torch.ones(2).double())], differ("['x']: ", 1, D2, F2)),
        (
            [{"x": np.float32(1)}, {"x": np.float64(1)}],
            differ("['x']: ", 1, "a numpy array of float64[]", "a numpy array of float32[]"),
        ),
        (
            [{"x": torch.ones(2)}, {"x": np.ones(2, "f4")}],
            differ("['x']: ", 1, "a numpy array of float32[2]", F2),
        ),
        ([1, 2.0], differ("['sample']: ", 1, "a float", "an int")),
        ([True, 1], differ("['sample']: ", 1, "an int", "a bool")),
        (["a", torch.ones(2)], differ("['sample']: ", 1, F2, "a str")),
        ([torch.ones(2), None], differ("['sample']: ", 1, "a NoneType", F2)),
        ([2**63, 0], "['sample']: got integers that exceed int64"),
        (
            [{"x": 1, "y": 2}, {"x": 1, "z": 2}],
            "sample 1 has keys ['x', 'z'], sample 0 has ['x', 'y']: missing ['y'], extra ['z'].",
        ),
        (
            [td(n=td(x=torch.ones(1))), td(n=td())],
            "['n']: sample 1 has keys [], sample 0 has ['x']: missing ['x'], extra [].",
        ),
        ([{"a": {"b": 1}}, {"a": 1}], differ("['a']: ", 1, "an int", "a dict")),
        ([{"x": 1}, td()], differ("", 1, "a TensorDict of batch size []", "a dict")),
        (
            [TensorDict({}, TWO), TensorDict({}, NONE)],
            differ("", 1, "a TensorDict of batch size []", "a TensorDict of batch size [2]"),
        ),
        (
            [TensorDict({}, TWO, names=["t"]), TensorDict({}, TWO)],
            "sample 1 has names [None], sample 0 has ['t'].",
        ),
        ([(1, 2), (1,)], differ("", 1, "a tuple of 1", "a tuple of 2")),
        ([(1, [2]), (1, (2,))], differ("['1']: ", 1, "a tuple of 1", "a list of 1")),
    ],
)
def test_samples_that_differ(samples, message):
    with pytest.raises(LayoutError, match=re.escape(message)):
        collate(samples)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"x": jnp.ones(2)}], "['x']: got a jax array in a sample. Make torch or numpy data in"),
        ([(1, jnp.ones(2))], "['sample', '1']: got a jax array in a sample."),
        ([{"x": [jnp.ones(2)]}], "['x']: got a list that holds a jax array"),
        ([{"x": [torch.ones(2)]}], f"['x']: got a list that holds {F2}. Stack its parts, or name"),
        ([{"x": [{"y": [td()]}]}], "['x']: got a list that holds a TensorDict of batch size []"),
        ([{1: 2}], "['1']: got a key of type int; a TensorDict has strings for keys."),
        ([{"x": torch.ones(2).to_sparse()}], "['x']: sample 0 has a tensor of layout torch.sparse"),
        ([torch.ones(2), torch.ones(2, device="meta")], "sample 1 has a tensor on the meta device"),
        ([np.ma.masked_array([1])], "['sample']: sample 0 has a MaskedArray, which may hold more"),
        ({"x": 1}, "got a dict: expected a list of samples, or a batch that is a TensorDict"),
        (3, "got an int: expected a list of samples"),
        ([zoo.unbatched()] * 2, "got an UnbatchedTensor, which a consolidated tensordict cannot"),
    ],
)
def test_what_no_batch_can_hold(samples, message):
    with pytest.raises(LeafTypeError, match=re.escape(message)):
        collate(samples)


def test_a_jax_array_that_only_a_later_sample_has():
    samples = [{"x": torch.ones(2)}, {"x": jnp.ones(2)}]
    message = (
        "['x']: sample 1 has a jax array: make torch or numpy data in the dataset, sample 0 has"
    )
    with pytest.raises(LayoutError, match=re.escape(message)):
        collate(samples)


def test_a_jax_array_that_a_tensordict_took_for_a_non_tensor():
    with pytest.raises(LeafTypeError, match=re.escape("['n', 'x']: got a jax array in a sample.")):
        collate([td(n=td(x=jnp.ones(2)))])
