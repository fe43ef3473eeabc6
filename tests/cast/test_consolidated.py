"""A consolidated tree is cast to a consolidated one; `out=` fills one again."""

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tdbridge import ArrayDict, LayoutError, cast, consolidate, layout_of, to_jax
from tests import zoo
from tests.cast.test_cast import expected
from tests.layout.check import (
    assert_leaves_in_one_buffer,
    assert_same_leaves,
    assert_same_nodes,
    buffer_of,
)

ODD = {f"x{i}": torch.arange(float(i + 1)) for i in range(40)}


def trees() -> dict[str, TensorDict]:
    """Equal leaves, leaves without padding, odd ones, and several dtypes that become one."""
    several = {f"{n}{i}": zoo.pattern(n, i + 1) for i in range(4) for n in ("float16", "float32")}
    return {
        "equal": TensorDict({f"x{i}": torch.arange(16.0) + i for i in range(100)}),
        "without padding": TensorDict({f"x{i}": torch.arange(64.0 * (i + 1)) for i in range(9)}),
        "odd": TensorDict(ODD | {"i": torch.arange(3)}),
        "several": TensorDict(several | {n: zoo.pattern(n, 3) for n in ("float64", "bool")}),
    }  # fmt: skip


def shifted(td: TensorDict, by: int) -> TensorDict:
    return td.apply(lambda t: t + by if t.is_floating_point() else t)


def assert_cast(got: Any, td: Any, name: str) -> None:
    values = {path: zoo.as_numpy(leaf) for path, leaf in zoo.leaves(td).items()}
    assert_same_leaves(got, {path: expected(array, name) for path, array in values.items()})
    assert_leaves_in_one_buffer(got)
    assert got.is_locked
    assert layout_of(got) == layout_of(consolidate(cast(td, name)))


@pytest.mark.parametrize("name", ["bfloat16", "float64", "float8_e5m2"])
@pytest.mark.parametrize("kind", trees())
def test_the_result_is_consolidated_again(kind: str, name: str):
    """Narrower or wider, each leaf is at its aligned place of the new layout; padding is zero."""
    td = trees()[kind]
    got = cast(consolidate(td), name)
    assert_cast(got, td, name)
    assert buffer_of(got).tobytes() == buffer_of(consolidate(cast(td, name))).tobytes()


@pytest.mark.parametrize("name", [name for name in zoo.TREES if name != "empty"])
def test_trees_of_the_zoo(name: str):
    """Classes, names, devices and non-tensor entries are those of the tree."""
    td = zoo.TREES[name]()
    got = cast(consolidate(td), torch.bfloat16)
    assert_same_nodes(got, td)
    arrays = zoo.expected(name)
    assert_same_leaves(got, {path: expected(a, "bfloat16") for path, a in arrays.items()})
    assert got.is_consolidated()


@pytest.mark.parametrize("kind", trees())
def test_out_is_filled_again(kind: str):
    """In place and exactly, from a consolidated tree and from any other one."""
    td = trees()[kind]
    out = cast(consolidate(td), "bfloat16", keep="x1*")
    first = next(iter(zoo.leaves(out).values()))
    for source in (shifted(td, 1), consolidate(shifted(td, 2))):
        address = first.data_ptr()
        assert cast(source, "bfloat16", keep="x1*", out=out) is out
        wanted = cast(TensorDict(source.to_dict()), "bfloat16", keep="x1*")
        assert_same_leaves(out, {p: zoo.as_numpy(t) for p, t in zoo.leaves(wanted).items()})
        assert first.data_ptr() == address
        assert out.is_consolidated()


@pytest.mark.parametrize("kind", ["equal", "odd"])
@pytest.mark.parametrize("whole", [False, True])
def test_nan_has_the_documented_bits(kind: str, whole: bool):
    """Whatever way the leaves take, each NaN is written as the one of the new dtype."""
    td = trees()[kind].apply(
        lambda t: t.index_fill(0, torch.tensor(0), -torch.nan) if t.is_floating_point() else t
    )
    source = consolidate(td) if whole else td
    first = cast(source, "bfloat16")
    for got in (first, cast(source, "bfloat16", out=cast(consolidate(td), "bfloat16"))):
        bits = [leaf.view(torch.int16)[0].item() for leaf in got.values() if leaf.itemsize == 2]
        assert set(bits) == {0x7FC0}


def test_leaves_that_ask_for_gradients_are_cast_one_by_one():
    """The result is differentiable then, and no consolidated tree, which carries no gradient."""
    whole = consolidate(trees()["equal"])
    whole["x3"].requires_grad_()
    cast(whole, torch.float64)["x3"].sum().backward()
    assert whole["x3"].grad.tolist() == [1.0] * 16
    with torch.no_grad():
        assert cast(whole, torch.float64).is_consolidated()


def test_a_moved_leaf_is_seen():
    """`leaf.data = ...` takes a leaf out of the buffer: its new values are cast."""
    whole = consolidate(trees()["equal"])
    whole["x3"].data = torch.full((16,), 7.0)
    assert cast(whole, torch.bfloat16)["x3"].tolist() == [7.0] * 16


def test_nothing_to_cast_gives_the_tree_itself():
    """As `consolidate` does with a consolidated tree."""
    whole = consolidate(zoo.nested())
    assert cast(whole, torch.float32) is whole


def test_the_result_is_shared_with_jax():
    """All leaves of the result are aligned, so that JAX takes them without a copy."""
    got = cast(consolidate(trees()["odd"].exclude("i")), torch.bfloat16)
    array = to_jax(got, copy=False)["x3"]
    assert array.unsafe_buffer_pointer() == got["x3"].data_ptr()
    assert np.asarray(array).astype(float).tolist() == [0, 1, 2, 3]


def test_another_out_is_refused():
    """One of another dtype, one in no buffer, and one for a tree that is no TensorDict."""
    td = trees()["equal"]
    whole = consolidate(td)
    for source in (td, whole):
        with pytest.raises(LayoutError, match=r"at \['x0'\]: .*float32.*bfloat16"):
            cast(source, torch.bfloat16, out=consolidate(td))
        with pytest.raises(LayoutError, match=r"no result of tdbridge.consolidate"):
            cast(source, torch.bfloat16, out=cast(td, torch.bfloat16))
    with pytest.raises(LayoutError, match="got `out` with a ArrayDict"):
        cast(ArrayDict({}), torch.bfloat16, out=whole)
    assert torch.equal(whole["x5"], td["x5"])


def test_a_leaf_of_the_result_can_be_written_with_a_gradient():
    """The leaves are views of one buffer that torch lets change one by one, as stock's are."""
    whole = consolidate(TensorDict({f"x{i}": torch.ones(4) for i in range(5)}))
    low = cast(whole, torch.bfloat16)
    low["x1"].add_(torch.ones(4, dtype=torch.bfloat16, requires_grad=True))
    assert low["x1"].tolist() == [2] * 4
    assert low["x2"].tolist() == [1] * 4
