"""all_reduce, reduce and reduce_scatter: values of each dtype and op, and who has them."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

import tdbridge
from tdbridge import collectives
from tests.multiprocess.pool import Pool
from tests.multiprocess.trees import (
    CARRIES,
    COMPLEX,
    FLOAT8,
    FLOATS,
    FORMS,
    INTEGERS,
    bits,
    columns,
    consolidated,
    numpys,
    part,
    reduced,
    text_of,
    wrong,
)

pytestmark = pytest.mark.xdist_group("multiprocess")

SHAPE = 3, 5
OPS = [(op, None) for op in CARRIES] + [("sum", "float32"), ("mean", "float64"), ("max", "float32")]


def names_of(op: str, accumulate: str | None) -> list[str]:
    """The dtypes; those of 8 bits only add up in wider ones."""
    wide = FLOAT8[:4] if accumulate and op != "max" else []
    return [name for name in CARRIES[op] + wide if not (wide and name in ("float32", "float64"))]


def reduced_trees() -> dict[Any, Any]:
    rank = dist.get_rank()
    found = {}
    for op, accumulate in OPS:
        names = names_of(op, accumulate)
        for form, make in FORMS.items():
            tree = make(names, rank, *SHAPE)
            result = collectives.all_reduce(tree, op, accumulate=accumulate)
            found[op, accumulate, form] = bits(result)
    return found


def expected(op: str, accumulate: str | None, size: int) -> dict[str, np.ndarray]:
    all_parts = {
        name: [part(name, rank, *SHAPE) for rank in range(size)]
        for name in names_of(op, accumulate)
    }
    return {
        name: wide(op, parts, accumulate) if accumulate else reduced(op, parts)
        for name, parts in all_parts.items()
    }


def wide(op: str, parts: list[np.ndarray], accumulate: str) -> np.ndarray:
    dtype = parts[0].dtype
    if dtype.name not in FLOATS + FLOAT8 or np.dtype(accumulate).itemsize <= dtype.itemsize:
        return reduced(op, parts)
    return reduced(op, [p.astype(accumulate) for p in parts]).astype(dtype)


def test_all_reduce_gives_each_rank_what_numpy_gives(each: Pool):
    """For every dtype, reduction and form of a tree."""
    for found in each.run(reduced_trees):
        for (op, accumulate, form), got in found.items():
            bad = wrong(got, expected(op, accumulate, each.size))
            assert not bad, (op, accumulate, form, bad)


def one_rank_alone() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    names = CARRIES["sum"]
    found = []
    for dst in range(size):
        tree = consolidated(names, rank, *SHAPE)
        result = collectives.reduce(tree, dst)
        group_dst = collectives.reduce(numpys(names, rank, *SHAPE), group_dst=dst, op="sum")
        found.append((result is tree, result is None, group_dst and bits(group_dst), bits(tree)))
    return found


def test_reduce_gives_one_rank_the_result(each: Pool):
    """The trees of the others keep their values, and None is what they get."""
    names, size = CARRIES["sum"], each.size
    total = {n: reduced("sum", [part(n, rank, *SHAPE) for rank in range(size)]) for n in names}
    for rank, found in enumerate(each.run(one_rank_alone)):
        for dst, (same, nothing, other, kept) in enumerate(found):
            assert (same, nothing) == (rank == dst, rank != dst)
            own = {name: part(name, rank, *SHAPE) for name in names}
            assert not wrong(kept, total if rank == dst else own)
            assert not other or not wrong(other, total)
            assert bool(other) == (rank == dst)


def scattered() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for op in CARRIES:
        names = CARRIES[op]
        for form, make in FORMS.items():
            trees = [make(names, rank * size + i, *SHAPE) for i in range(size)]
            found[op, form] = bits(collectives.reduce_scatter(trees, op))
            assert not any(
                wrong(bits(tree), bits(make(names, rank * size + i, *SHAPE)))
                for i, tree in enumerate(trees)
            )
    names = CARRIES["sum"]
    stack = torch.stack([columns(names, rank * size + i, *SHAPE) for i in range(size)])
    found["sum", "stacked"] = bits(collectives.reduce_scatter(stack))
    arrays = FORMS["arraydict"](names, rank, size, *SHAPE)
    result = collectives.reduce_scatter(arrays)
    found["sum", "arrays"] = bits(result)
    assert type(result) is tdbridge.ArrayDict
    return found


def test_reduce_scatter_gives_each_rank_its_own(each: Pool):
    """Of a list of trees or of one with a dimension more; those are only read."""
    size = each.size
    for rank, found in enumerate(each.run(scattered)):
        for (op, form), got in found.items():
            for name, value in got.items():
                if form == "arrays":
                    parts = [part(name, other, size, *SHAPE)[rank] for other in range(size)]
                else:
                    parts = [part(name, other * size + rank, *SHAPE) for other in range(size)]
                assert value.tobytes() == reduced(op, parts).tobytes(), (op, form, name)


def other_ways() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    names = [*FLOATS, *COMPLEX]
    by_enum = {
        str(op): bits(collectives.all_reduce(columns(FLOATS, rank, *SHAPE), op))
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
    }
    own = collectives.premul_sum(rank + 1)
    premul = [
        bits(collectives.all_reduce(make(names, rank, *SHAPE), own)) for make in FORMS.values()
    ]
    lists = [columns(names, rank + i, *SHAPE) for i in range(size)]
    scattered = bits(collectives.reduce_scatter(lists, own))
    to_first = collectives.reduce(columns(names, rank, *SHAPE), 0, own)
    return by_enum, premul, scattered, None if to_first is None else bits(to_first)


def test_the_names_of_torch_and_a_factor_of_each_rank(each: Pool):
    """A ReduceOp means the same as the name; premul_sum multiplies by the rank's own factor."""
    size = each.size
    torch_names = ["RedOpType.SUM", "RedOpType.AVG", "RedOpType.MAX", "RedOpType.MIN"]
    by_name = dict(zip(torch_names, ["sum", "mean", "max", "min"], strict=True))
    for rank, (by_enum, premul, scattered, to_first) in enumerate(each.run(other_ways)):
        for enum, got in by_enum.items():
            op = by_name[enum]
            parts = {n: [part(n, other, *SHAPE) for other in range(size)] for n in FLOATS}
            assert not wrong(got, {name: reduced(op, own) for name, own in parts.items()})
        total = {name: weighted(name, 0, size) for name in [*FLOATS, *COMPLEX]}
        for got in premul:
            assert not wrong(got, total)
        assert not wrong(scattered, {n: weighted(n, rank, size) for n in [*FLOATS, *COMPLEX]})
        assert (not wrong(to_first, total)) if rank == 0 else to_first is None


def weighted(name: str, shift: int, size: int) -> np.ndarray:
    parts = [part(name, rank + shift, *SHAPE) for rank in range(size)]
    return reduced("sum", [p * p.dtype.type(rank + 1) for rank, p in enumerate(parts)])


def some_of_them() -> Any:
    rank = dist.get_rank()
    found = []
    for make in FORMS.values():
        tree = make(["int32", "float32", "bool"], rank, *SHAPE)
        result = collectives.all_reduce(tree, "mean", where=torch.is_floating_point)
        found.append(bits(result))
    lists = [columns(["int32", "float32"], rank + i, *SHAPE) for i in range(dist.get_world_size())]
    found.append(bits(collectives.reduce_scatter(lists, "mean", where=torch.is_floating_point)))
    return found


def test_where_leaves_the_other_leaves_as_they_are(each: Pool):
    """A mean over the floats of a tree with integers; reduce_scatter keeps those of its own."""
    for rank, found in enumerate(each.run(some_of_them)):
        *every, scattered = found
        mean = reduced("mean", [part("float32", other, *SHAPE) for other in range(each.size)])
        kept = {name: part(name, rank, *SHAPE) for name in ("int32", "bool")}
        for got in every:
            assert not wrong(got, kept | {"float32": mean})
        own = [part("float32", other + rank, *SHAPE) for other in range(each.size)]
        assert not wrong(
            scattered,
            {"int32": part("int32", 2 * rank, *SHAPE), "float32": reduced("mean", own)},
        )


def fine_grained() -> Any:
    tree = {"w": torch.full((100,), 1.0 + 2.0**-7 * dist.get_rank(), dtype=torch.bfloat16)}
    exact = collectives.all_reduce({"w": tree["w"].clone()}, accumulate="float32")
    rough = collectives.all_reduce({"w": tree["w"].clone()})
    return exact["w"].float().tolist(), rough["w"].float().tolist()


def test_accumulate_rounds_once(each: Pool):
    """The sum in float32, rounded once; without it each addition may round."""
    size = each.size
    total = np.float32(sum(1.0 + 2.0**-7 * rank for rank in range(size)))
    once = float(torch.tensor(total).bfloat16())
    for exact, rough in each.run(fine_grained):
        assert exact == [once] * 100
        # Each of the size - 1 additions rounds by at most half of 2**-7 of a value below 8.
        assert max(abs(value - total) for value in rough) <= (size - 1) * 2**-6


def no_such_reduction() -> dict[str, str]:
    reduce = partial(text_of, collectives.all_reduce)
    leaf = TensorDict(x=torch.ones(2), n=TensorDict(y=torch.ones(2, dtype=torch.int64)))
    small = {"f": torch.ones(2).to(torch.float8_e5m2)}
    return {
        "integer mean": reduce(leaf, "mean"),
        "integer factor": reduce(leaf, collectives.premul_sum(2.0)),
        "bool sum": reduce({"b": torch.ones(2) > 0}, "sum"),
        "complex max": reduce({"c": torch.ones(2, dtype=torch.complex64)}, "max"),
        "complex product": reduce({"c": torch.ones(2, dtype=torch.complex64)}, "product"),
        "small sum": reduce(small, "sum"),
        "small mean": text_of(collectives.reduce, small, 0, "mean"),
        "scatter": text_of(collectives.reduce_scatter, [leaf] * dist.get_world_size(), "mean"),
        "no op": reduce(leaf, "xor"),
        "accumulate": reduce(leaf, accumulate="int32"),
        "accumulate it": reduce(leaf, accumulate="no dtype"),
        "check": reduce(leaf, check="sometimes"),
        "too few": text_of(collectives.reduce_scatter, [leaf]),
        "unequal": text_of(
            collectives.reduce_scatter,
            [{"x": torch.ones(2 + (i == 1))} for i in range(dist.get_world_size())],
        ),
        "not stacked": text_of(collectives.reduce_scatter, leaf),
        "to itself": text_of(collectives.reduce, leaf, 0, group_dst=0),
        "to nobody": text_of(collectives.reduce, leaf),
        "to a stranger": text_of(collectives.reduce, leaf, 7),
        "works again": str(collectives.all_reduce({"x": torch.ones(2)})["x"].sum().item()),
    }


def test_what_has_no_such_reduction_is_named(three: Pool):
    """Every rank raises, the error names the leaf and says what to do, and the next call works."""
    first, *others = three.run(no_such_reduction)
    assert all(other == first for other in others)
    rounds = "it would round integers; leave them out by where=is_floating."
    assert first == {
        "integer mean": f"['n', 'y']: got int64 with op='mean': {rounds}",
        "integer factor": f"['n', 'y']: got int64 with op='premul_sum(2.0)': {rounds}",
        "bool sum": "['b']: got bool with op='sum': booleans have max ('any') and min ('all') "
        "alone.",
        "complex max": "['c']: got complex64 with op='max': complex numbers have a sum and a mean "
        "alone.",
        "complex product": "['c']: got complex64 with op='product': complex numbers have a sum and "
        "a mean alone.",
        "small sum": "['f']: got float8_e5m2 with op='sum': a sum in 8 bits would be lost; pass "
        "accumulate='float32'.",
        "small mean": "['f']: got float8_e5m2 with op='mean': a sum in 8 bits would be lost; pass "
        "accumulate='float32'.",
        "scatter": f"['n', 'y']: got int64 with op='mean': {rounds}",
        "no op": "got op='xor': use one of max, mean, min, product, sum, or premul_sum(factor).",
        "accumulate": "got accumulate='int32': pass a floating-point dtype, such as 'float32'.",
        "accumulate it": "got accumulate='no dtype': pass a floating-point dtype, such as "
        "'float32'.",
        "check": "check is 'first', 'always' or 'never', got 'sometimes'.",
        "too few": "reduce_scatter: got 1 trees, expected 3, one for each member.",
        "unequal": "reduce_scatter: tree 1 has other leaves than tree 0 of the list. ['x']: "
        "float32 [3] there, float32 [2] in tree 0.",
        "not stacked": "reduce_scatter: got a tree of batch size [], expected one that starts with "
        "3, a slice for each member of the group, or a list of trees.",
        "to itself": "pass either dst, a global rank, or group_dst.",
        "to nobody": "pass either dst, a global rank, or group_dst.",
        "to a stranger": "got dst=7: the group has the global ranks [0, 1, 2].",
        "works again": "6.0",
    }


def begun_first() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    trees = [consolidated(FLOATS, rank + i, *SHAPE) for i in range(4)]
    kinds = [FORMS[form](INTEGERS, rank, *SHAPE) for form in ("arraydict", "numpys")]
    handles = [collectives.all_reduce(tree, async_op=True) for tree in [*trees, *kinds]]
    handles += [collectives.reduce(consolidated(FLOATS, rank, *SHAPE), 0, async_op=True)]
    lists = [columns(FLOATS, rank + i, *SHAPE) for i in range(size)]
    handles += [collectives.reduce_scatter(lists, async_op=True)]
    results = [handle.wait() for handle in reversed(handles)][::-1]
    assert all(handle.is_completed() for handle in handles)
    assert all(handle.wait() is result for handle, result in zip(handles, results, strict=True))
    return [r is t for r, t in zip(results, trees, strict=False)], [
        None if result is None else bits(result) for result in results
    ]


def test_several_may_be_on_their_way(each: Pool):
    """Handles give their results in any order, and the same one when asked again."""
    size = each.size

    def total(names: list[str], shift: int) -> dict[str, np.ndarray]:
        return {n: reduced("sum", [part(n, r + shift, *SHAPE) for r in range(size)]) for n in names}

    for rank, (same, found) in enumerate(each.run(begun_first)):
        assert same == [True] * 4
        for i in range(4):
            assert not wrong(found[i], total(FLOATS, i))
        for got in found[4:6]:
            assert not wrong(got, total(INTEGERS, 0))
        assert (not wrong(found[6], total(FLOATS, 0))) if rank == 0 else found[6] is None
        assert not wrong(found[7], total(FLOATS, rank))
