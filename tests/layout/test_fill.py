"""Runs of equal leaves are copied together, and to the same places as one by one."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdbridge import consolidate
from tdbridge.layout import fill as module
from tests import zoo
from tests.layout.check import assert_leaves_in_one_buffer, assert_same_leaves, buffer_of

Path = tuple[str, ...]


def check(td: TensorDict) -> None:
    """Consolidated, and refilled from zeroed leaves: the values of `td`, and zeros between."""
    expected = {path: zoo.as_numpy(leaf) for path, leaf in zoo.leaves(td).items()}
    out = consolidate(td)
    for again in (False, True):
        if again:
            for leaf in zoo.leaves(out).values():
                leaf.reshape(-1).view(torch.uint8).fill_(255)
            consolidate(td, out=out)
        assert_same_leaves(out, expected)
        assert_leaves_in_one_buffer(out)
        used = sum(
            np.count_nonzero(np.frombuffer(a.tobytes(), np.uint8)) for a in expected.values()
        )
        assert np.count_nonzero(buffer_of(out)) == used


@pytest.mark.parametrize("name", zoo.BOTH)
def test_a_run_of_every_dtype(name):
    """Bits are kept, extremes included, with leaves of another shape before, between and after."""
    rng = np.random.default_rng(0)
    td = TensorDict({})
    for key in ("a", "d", "z"):
        td[key] = zoo.pattern(name, 7)
    for group in ("b", "c", "e"):
        for i in range(4):
            raw = torch.from_numpy(rng.integers(0, 256, 64).astype(np.uint8))
            dtype = getattr(torch, name)
            values = raw > 127 if name == "bool" else raw.view(dtype)
            td[f"{group}{i}"] = values[: 3 if group == "c" else None]
    check(td)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (16,), (1024,), (1025,), (2, 3, 1)])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_shapes_and_lengths_of_runs(shape, count):
    """Scalars, empty leaves, those of a cache line, and those too large or too few to stack."""
    td = TensorDict({f"l{i}": zoo.pattern("float32", *shape) + i for i in range(count)})
    check(td.set("z", zoo.pattern("int8", 5)))


def test_a_run_longer_than_one_stack():
    """It is copied in parts, each leaf to its own place."""
    check(TensorDict({f"l{i:04}": torch.full((3,), float(i)) for i in range(2500)}))


def test_the_order_of_the_tree_does_not_count():
    """A leaf goes to the place of its path, wherever it stands in the tree."""
    keys = ["e", "a", "d", "b", "c"]
    td = TensorDict({key: torch.full((3,), float(ord(key))) for key in keys})
    td["b2"] = TensorDict({key: torch.full((3,), -float(ord(key))) for key in reversed(keys)})
    check(td)


def test_sources_that_are_no_plain_blocks():
    """Strided, broadcast, conjugate, negative and parameter leaves are copied by value."""
    z = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    td = TensorDict({})
    for i in range(4):
        td[f"column{i}"] = (torch.arange(24.0) + i).reshape(4, 6)[:, i]
        td[f"expanded{i}"] = torch.full((1,), float(i)).expand(4)
        td[f"conj{i}"] = (z + i).conj()
        td[f"neg{i}"] = (z + i).conj().imag
        td[f"transposed{i}"] = (torch.arange(6.0) + i).reshape(2, 3).t()
        td[f"parameter{i}"] = torch.nn.Parameter(torch.full((4,), float(i)))
    check(td)
    assert not consolidate(td)["parameter0"].requires_grad


def test_torch_counts_the_writes():
    """A refill is seen by the counter that finds writes to shared memory."""
    td = TensorDict({f"l{i}": torch.ones(4) for i in range(5)})
    out = consolidate(td)
    before = out["l3"]._version
    consolidate(td, out=out)
    assert out["l3"]._version > before


def test_equal_leaves_are_stacked(monkeypatch):
    """One by one go only those of another dtype or shape, the large ones and pairs."""
    alone = []
    original = module.copy_all
    monkeypatch.setattr(
        module,
        "copy_all",
        lambda targets, sources: alone.extend(sources) or original(targets, sources),
    )
    run = {f"run{i}": torch.full((3,), float(i)) for i in range(3)}
    rest = {"other": torch.ones(4), "pair0": torch.ones(5), "pair1": torch.ones(5)}
    rest |= {f"large{i}": torch.ones(2000) for i in range(3)}
    check(TensorDict(run | rest))
    assert {tuple(leaf.shape) for leaf in alone} == {(4,), (5,), (2000,)}


def test_elsewhere_than_on_the_cpu():
    """Nothing is stacked there, and nothing is asked for its address."""
    out = consolidate(TensorDict({f"l{i}": torch.ones(3) for i in range(4)}), device="meta")
    assert [leaf.device.type for leaf in zoo.leaves(out).values()] == ["meta"] * 4
