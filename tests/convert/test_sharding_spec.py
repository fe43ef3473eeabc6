"""Placements and PartitionSpecs: which box of a tensor each rank holds, by torch, JAX and numpy."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tdbridge._compat import torch as compat
from tdbridge.convert.sharding import to_partition_spec, to_placements
from tdbridge.errors import LeafTypeError

P = PartitionSpec
MESHES = [(8,), (2, 4), (4, 2), (2, 3), (1, 4), (2, 2, 2), (2, 1, 3)]
NAMES = "abc"

Box = tuple[tuple[int, int], ...]  # (offset, size) per dimension


def axes_of(mesh_shape: Sequence[int]) -> dict[str, int]:
    return dict(zip(NAMES, mesh_shape, strict=False))


def coordinates(mesh_shape: Sequence[int]) -> list[tuple[int, ...]]:
    return list(np.ndindex(*mesh_shape))


def even_shape(mesh_shape: Sequence[int], ndim: int) -> tuple[int, ...]:
    """A shape that every cut divides, no two dimensions of one size."""
    return tuple(math.prod(mesh_shape) * (dim + 1) for dim in range(ndim))


def shards_of_torch(
    shape: Sequence[int], mesh_shape: tuple[int, ...], placements: Sequence[Placement]
) -> list[Box]:
    """The box of each rank, computed by torch."""
    found = []
    for coordinate in coordinates(mesh_shape):
        sizes, offsets = _compute_local_shape_and_global_offset(
            torch.Size(shape), mesh_shape, list(coordinate), placements
        )
        found.append(tuple(zip(offsets, sizes, strict=True)))
    return found


def boxes_of_jax(shape: Sequence[int], mesh_shape: Sequence[int], spec: PartitionSpec) -> list[Box]:
    """The box of each device, computed by JAX."""
    devices = np.array(jax.devices("cpu")[: math.prod(mesh_shape)]).reshape(mesh_shape)
    sharding = NamedSharding(Mesh(devices, tuple(NAMES[: len(mesh_shape)])), spec)
    slices = sharding.devices_indices_map(tuple(shape))
    return [
        tuple((s.start or 0, (size if s.stop is None else s.stop) - (s.start or 0))
              for s, size in zip(slices[device], shape, strict=True))
        for device in devices.flat
    ]  # fmt: skip


def rows(size: int, coordinate: Sequence[int], mesh_shape: Sequence[int], cuts: Any) -> np.ndarray:
    """The indices of one dimension that a rank holds: each cut by hand, in the order of the mesh.

    `cuts` holds the split factor per mesh axis, None for an axis that does not cut.
    """
    held = np.arange(size)
    for index, pieces, split_factor in zip(coordinate, mesh_shape, cuts, strict=True):
        if split_factor is not None:
            held = held.reshape(split_factor, pieces, -1)[:, index].reshape(-1)
    return held


def every_placement(ndim: int) -> list[Placement]:
    return [Replicate(), *(Shard(dim) for dim in range(ndim))]


def every_spec(mesh_shape: Sequence[int], ndim: int) -> Iterator[PartitionSpec]:
    """All the specs that a mesh allows: each axis unused, or somewhere in a dimension's order."""
    names = NAMES[: len(mesh_shape)]
    for dims in itertools.product([None, *range(ndim)], repeat=len(names)):
        members = [[n for n, d in zip(names, dims, strict=True) if d == k] for k in range(ndim)]
        for order in itertools.product(*(itertools.permutations(group) for group in members)):
            yield P(*(group if len(group) > 1 else next(iter(group), None) for group in order))


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_placements_become_the_spec_of_the_same_boxes(mesh_shape: tuple[int, ...], ndim: int):
    """For every choice of Shard and Replicate each device holds the box that torch computes."""
    shape, axes = even_shape(mesh_shape, ndim), axes_of(mesh_shape)
    for placements in itertools.product(every_placement(ndim), repeat=len(mesh_shape)):
        spec = to_partition_spec(placements, axes, ndim)
        expected = shards_of_torch(shape, mesh_shape, placements)
        assert boxes_of_jax(shape, mesh_shape, spec) == expected, (placements, spec)


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("ndim", [1, 2])
def test_every_spec_becomes_placements_of_the_same_boxes(mesh_shape: tuple[int, ...], ndim: int):
    """For every spec, whatever the order of its axes, each rank holds the box that JAX computes."""
    shape, axes = even_shape(mesh_shape, ndim), axes_of(mesh_shape)
    for spec in every_spec(mesh_shape, ndim):
        placements = to_placements(spec, axes)
        expected = boxes_of_jax(shape, mesh_shape, spec)
        assert shards_of_torch(shape, mesh_shape, placements) == expected, (placements, spec)


@pytest.mark.parametrize("mesh_shape", [(2, 3), (2, 2, 2), (2, 4)], ids=str)
def test_a_spec_comes_back(mesh_shape: tuple[int, ...]):
    """spec -> placements -> spec is the identity, but for the None that a spec may end with."""
    axes = axes_of(mesh_shape)
    for spec in every_spec(mesh_shape, 2):
        last = max((i for i, names in enumerate(spec, 1) if names is not None), default=0)
        assert to_partition_spec(to_placements(spec, axes), axes, 2) == P(*spec[:last])


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3), (4, 2), (2, 2, 2)], ids=str)
def test_a_strided_shard_is_carried_when_and_only_when_it_is_a_box(mesh_shape: tuple[int, ...]):
    """For every split factor: a spec of the same rows, or, where a rank holds gaps, an error."""
    size, axes, outcomes = 48, axes_of(mesh_shape), set()
    factors = [None, 1, 2, 3, 4, 6, 8]
    for cuts in itertools.product(factors, repeat=len(mesh_shape)):
        if size % math.prod(n * (f or 1) for n, f in zip(mesh_shape, cuts, strict=True)):
            continue
        placements = [Replicate() if f is None else _StridedShard(0, split_factor=f) for f in cuts]
        held = [rows(size, c, mesh_shape, cuts) for c in coordinates(mesh_shape)]
        is_box = all((np.diff(indices) == 1).all() for indices in held)
        outcomes.add(is_box)
        if is_box:
            spec = to_partition_spec(placements, axes, 1)
            expected = [((int(indices[0]), len(indices)),) for indices in held]
            assert boxes_of_jax((size,), mesh_shape, spec) == expected, (placements, spec)
        else:
            with pytest.raises(LeafTypeError, match="holds slices with gaps"):
                to_partition_spec(placements, axes, 1)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("placements", "spec"),
    [
        ([Replicate(), Replicate()], P()),
        ([Shard(0), Replicate()], P("a")),
        ([Replicate(), Shard(0)], P("b")),
        ([Shard(0), Shard(1)], P("a", "b")),
        ([Shard(1), Shard(0)], P("b", "a")),
        ([Replicate(), Shard(2)], P(None, None, "b")),
        ([Shard(0), Shard(0)], P(("a", "b"))),
        ([Shard(-1), Shard(-3)], P("b", None, "a")),
        ([_StridedShard(0, split_factor=4), Shard(0)], P(("b", "a"))),
        ([_StridedShard(-2, split_factor=4), Shard(1)], P(None, ("b", "a"))),
    ],
)
def test_known_pairs(placements: list[Placement], spec: PartitionSpec):
    """What the documentation promises, on a mesh of 2 by 4 and a tensor of 3 dimensions."""
    assert to_partition_spec(placements, {"a": 2, "b": 4}, 3) == spec


def test_three_axes_in_any_order():
    """The split factor of an axis counts the pieces of the later axes that cut before it."""
    axes = {"a": 4, "b": 3, "c": 2}
    assert to_placements(P(("c", "a", "b")), axes) == (
        _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2), Shard(0)
    )  # fmt: skip
    assert to_placements(P(("c", "b", "a")), axes) == (
        _StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0)
    )  # fmt: skip


@pytest.mark.parametrize("placement", [Partial(), Partial("max"), Partial("avg")], ids=repr)
def test_partial_is_refused(placement: Placement):
    """A Partial placement has no counterpart: the error names the axis and says to redistribute."""
    expected = (
        f"got {placement!r} on mesh axis 'b', which JAX cannot spell: call dtensor.redistribute"
    )
    with pytest.raises(LeafTypeError, match=re.escape(expected)):
        to_partition_spec([Shard(0), placement], {"a": 2, "b": 4}, 1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("x"), "dimension 0 is not cut by axes of the mesh, {'a': 2, 'b': 4}."),
        (P(None, ("a", "x")), "dimension 1 is not cut by axes of the mesh"),
        (P("a", P.UNCONSTRAINED), "dimension 1 is not cut by axes of the mesh"),
        (P("a", unreduced=frozenset({"b"})), "reduce the array in JAX first"),
        (P("a", reduced=frozenset({"b"})), "reduce the array in JAX first"),
    ],
    ids=str,
)
def test_what_placements_cannot_spell_is_refused(spec: PartitionSpec, message: str):
    """A spec that leaves something open, or names an unknown axis, is an error that shows it."""
    with pytest.raises(LeafTypeError) as error:
        to_placements(spec, {"a": 2, "b": 4})
    assert str(spec) in str(error.value)
    assert message in str(error.value)


def test_one_placement_per_axis():
    """Another number of placements than of mesh axes raises, none is dropped."""
    with pytest.raises(ValueError, match="argument"):
        to_partition_spec([Shard(0)], {"a": 2, "b": 4}, 1)


def test_a_dimension_that_the_tensor_lacks_is_refused():
    """Shard(2) of a matrix is an error, not a shorter spec."""
    with pytest.raises(LeafTypeError, match=r"Shard\(dim=2\) of a tensor that has 2 dimensions"):
        to_partition_spec([Shard(2)], {"a": 2}, 2)


class TestWithoutStridedShard:
    """A version of torch that has no `_StridedShard`."""

    @pytest.fixture(autouse=True)
    def without(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(compat, "_StridedShard", None)

    def test_the_order_of_the_mesh_still_works(self):
        """Plain shards need nothing private."""
        axes = {"a": 2, "b": 4}
        assert to_placements(P(("a", "b")), axes) == (Shard(0), Shard(0))
        assert to_partition_spec([Shard(0), Shard(0)], axes, 1) == P(("a", "b"))

    def test_another_order_is_refused(self):
        """The error says to name the axes in the order of the mesh."""
        with pytest.raises(LeafTypeError, match="name the axes of that dimension in the order of"):
            to_placements(P(("b", "a")), {"a": 2, "b": 4})
