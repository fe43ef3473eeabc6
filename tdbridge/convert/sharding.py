"""DTensor placements <-> PartitionSpec: two spellings of which box of a tensor each rank holds.

torch lists, per mesh axis, the dimension that it cuts, and cuts in the order of the mesh. JAX
lists, per dimension, the mesh axes that cut it, in the order of the cuts:

    [Shard(0), Shard(1)]                              P('a', 'b')
    [Shard(0), Shard(0)]                              P(('a', 'b'))
    [_StridedShard(0, split_factor=n), Shard(0)]      P(('b', 'a')), where n is the size of 'b'

In the last line (tensor parallelism on 'b', then FSDP on 'a') a later axis cuts first. torch says
so by the split factor: the number of pieces that later axes have cut the dimension into before.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.distributed.tensor import DTensor, Placement, Replicate

from tdbridge._compat.torch import make_shard, shard_of
from tdbridge.convert.sharding_mesh import axes_of, jax_mesh, torch_mesh
from tdbridge.errors import LeafTypeError

__all__ = ["jax_mesh", "to_named_sharding", "to_partition_spec", "to_placements", "torch_mesh"]

Axes = Mapping[str, int]
"""The name and the size of each mesh axis, in the order of the mesh: `Mesh.shape` is one."""


def to_partition_spec(placements: Sequence[Placement], axes: Axes, ndim: int) -> PartitionSpec:
    """Translates DTensor placements.

    Args:
        placements: one per mesh axis, in the order of the mesh.
        axes: name and size of each mesh axis.
        ndim: number of dimensions of the tensor; negative dimensions count from there.

    Returns:
        The spec under which each device holds the box that torch gives to its rank, if every cut is
        even. It names no dimension after the last one that is cut.

    Raises:
        LeafTypeError: JAX has no spec for it: a Partial placement, or strided shards that are not
            boxes.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> to_partition_spec([Shard(0), Shard(-1)], {"a": 2, "b": 4}, 3)
        P('a', None, 'b')
        >>> to_partition_spec([Shard(0), Shard(0)], {"a": 2, "b": 4}, 3)
        P(('a', 'b'),)
        >>> to_partition_spec([Replicate(), Replicate()], {"a": 2, "b": 4}, 3)
        P()
    """
    cuts: list[list[str]] = [[] for _ in range(ndim)]
    # From the last axis: a split factor counts the pieces made by the later axes.
    for name, placement in reversed(list(zip(axes, placements, strict=True))):
        if not placement.is_replicate():
            _insert(cuts, name, placement, axes)
    while cuts and not cuts[-1]:
        cuts.pop()
    return PartitionSpec(*(_entry(names) for names in cuts))


def _insert(cuts: list[list[str]], name: str, placement: Placement, axes: Axes) -> None:
    """Puts the axis behind those that cut its dimension into `split factor` pieces."""
    dim, split_factor = _read(placement, name, len(cuts))
    names = cuts[dim]
    pieces = [math.prod(axes[n] for n in names[:i]) for i in range(len(names) + 1)]
    if split_factor not in pieces:
        raise LeafTypeError(
            f"got {placement!r} on mesh axis {name!r}, under which a rank holds slices with gaps, "
            "which JAX cannot spell: call dtensor.redistribute(placements=...) with "
            f"Shard({dim}) there first."
        )
    names.insert(pieces.index(split_factor), name)


def _read(placement: Placement, name: str, ndim: int) -> tuple[int, int]:
    """The dimension, counted from the front, and the split factor of a placement that shards."""
    shard = shard_of(placement)
    if shard is None:
        raise LeafTypeError(
            f"got {placement!r} on mesh axis {name!r}, which JAX cannot spell: call "
            "dtensor.redistribute(placements=...) with Replicate() or Shard(dim) there first."
        )
    if shard[0] not in range(-ndim, ndim):
        raise LeafTypeError(f"got {placement!r} of a tensor that has {ndim} dimensions.")
    return range(ndim)[shard[0]], shard[1]


def _entry(names: Sequence[str]) -> str | tuple[str, ...] | None:
    return tuple(names) if len(names) > 1 else names[0] if names else None


def to_placements(spec: PartitionSpec, axes: Axes) -> tuple[Placement, ...]:
    """Translates a PartitionSpec.

    Args:
        spec: which mesh axes cut each dimension, all of them known.
        axes: name and size of each mesh axis.

    Returns:
        One placement for each mesh axis. It is Replicate for an axis that the spec does not use,
        and torch's `_StridedShard` where a later axis cuts first.

    Raises:
        LeafTypeError: torch has no placements for it: an unconstrained dimension, unreduced axes,
            or an axis that the mesh does not have.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> to_placements(P(None, "a"), {"a": 2, "b": 4})
        (Shard(dim=1), Replicate())
        >>> to_placements(P(("b", "a")), {"a": 2, "b": 4})
        (_StridedShard(dim=0, sf=4), Shard(dim=0))
    """
    if spec.unreduced or spec.reduced:
        raise LeafTypeError(f"got {spec}: reduce the array in JAX first, torch cannot spell it.")
    placements: dict[str, Placement] = {name: Replicate() for name in axes}
    for dim, entry in enumerate(spec):
        names = _names(entry)
        if not placements.keys() >= set(names):
            raise LeafTypeError(
                f"got {spec}, whose dimension {dim} is not cut by axes of the mesh, {dict(axes)}."
            )
        for name, split_factor in _split_factors(names, axes):
            placements[name] = make_shard(dim, split_factor)
    return tuple(placements.values())


def _names(entry: Any) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _split_factors(names: Sequence[str], axes: Axes) -> Iterator[tuple[str, int]]:
    position = {name: i for i, name in enumerate(axes)}
    for i, name in enumerate(names):
        before = [n for n in names[:i] if position[n] > position[name]]
        yield name, math.prod(axes[n] for n in before)


def to_named_sharding(dtensor: DTensor) -> NamedSharding:
    """The sharding under which each device of a `jax_mesh` holds the local shard of its rank.

    Args:
        dtensor: of any dtype, in a job where JAX runs beside torch.distributed. Not read.

    Raises:
        LeafTypeError: a placement that JAX cannot spell, a dimension that is cut unevenly, or a job
            where JAX runs in one process alone; the error says what to do.
    """
    axes = axes_of(dtensor.device_mesh)
    spec = to_partition_spec(dtensor.placements, axes, dtensor.ndim)
    for dim, entry in enumerate(spec):
        _check_even(dtensor.shape, dim, _names(entry), axes)
    return NamedSharding(jax_mesh(dtensor.device_mesh), spec)


def _check_even(shape: torch.Size, dim: int, names: Sequence[str], axes: Axes) -> None:
    """In torch the last ranks of an uneven cut get less, or nothing; JAX has no such arrays."""
    pieces, size = math.prod(axes[name] for name in names), shape[dim]
    if size % pieces:
        raise LeafTypeError(
            f"got shape {tuple(shape)}, whose dimension {dim} the mesh axes {', '.join(names)} cut "
            f"into {pieces} uneven pieces, which JAX refuses: pad it to "
            f"{-(-size // pieces) * pieces}, redistribute with that dimension replicated, or use a "
            f"mesh whose size divides {size}."
        )
