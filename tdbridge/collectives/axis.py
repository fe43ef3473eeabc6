"""The calls inside of `jax.shard_map` or of a vmap with a name: psum and its kin, whole trees.

The leaves of one dtype go in one operation: as the segments of a packed tree, or joined here. For a
sum, a maximum and a minimum they are not joined: XLA makes one operation of several by itself.
All members run one program, so that there is nothing to agree on.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tdbridge.collectives.axis_leaves import (
    Axis,
    along,
    bits_of,
    chosen_leaves,
    exchanged_rows,
    flat_leaves,
    from_bits,
    gathered_rows,
    given_back,
    joined_rows,
    over_rows,
    reduced,
    rows_of,
)
from tdbridge.collectives.ops import MAX, MIN, PRODUCT, Op
from tdbridge.collectives.wire import Where
from tdbridge.errors import CollectiveError
from tdbridge.layout.dtypes import DType


def is_axis(group: Any) -> bool:
    """Whether `group=` is the name of an axis, or a tuple of names."""
    names = group if isinstance(group, tuple) else (group,)
    return bool(names) and all(isinstance(name, str) for name in names)


def all_reduce(tree: Any, op: Op, axis: Axis, where: Where | None, wide: DType | None) -> Any:
    """See `tdbridge.collectives.all_reduce`. Sums and means have the gradient of `lax.psum`."""
    members, (leaves, treedef) = members_of(axis), flat_leaves(tree)
    chosen = chosen_leaves(tree, leaves, op, where, wide)

    def reduce(values: list[Any]) -> Sequence[Any]:
        values = [along(value, axis) for value in values]
        if op.name == PRODUCT:  # of what all have; the maximum tells JAX that all have the same
            return lax.pmax(over_rows(op, gathered_rows(values, axis)), axis)
        if op.name in (MAX, MIN):
            return {MAX: lax.pmax, MIN: lax.pmin}[op.name](values, axis)
        return lax.psum(values, axis)

    with jax.enable_x64(True):  # 64 bits stay 64 bits
        found = reduced([leaves[i] for i in chosen], op, members, wide, reduce)
        for i, value in zip(chosen, found, strict=True):
            leaves[i] = value
        return treedef.unflatten(leaves)


def reduce_scatter(trees: Any, op: Op, axis: Axis, where: Where | None, wide: DType | None) -> Any:
    """See `tdbridge.collectives.reduce_scatter`."""
    members = members_of(axis)
    leaves, treedef, first = rows_of(trees, members, "reduce_scatter")
    chosen = chosen_leaves(first, leaves, op, where, wide)

    def reduce(rows: list[Any]) -> Sequence[Any]:
        if op.name in (MAX, MIN, PRODUCT):
            return over_rows(op, exchanged_rows(rows, axis))
        return joined_rows(rows, lambda row: lax.psum_scatter(row, axis), 0, axis)

    with jax.enable_x64(True):
        new = [row[lax.axis_index(axis)] for row in leaves]
        found = reduced([leaves[i] for i in chosen], op, members, wide, reduce)
        for i, value in zip(chosen, found, strict=True):
            new[i] = value
        return treedef.unflatten(new)


def broadcast(tree: Any, src: int, axis: Axis) -> Any:
    """See `tdbridge.collectives.broadcast`.

    A sum of bits, as zero from all other members: JAX knows that all have the same then, and a sum
    of floats would lose the sign of zero and the payload of NaN.
    """
    members = members_of(axis)
    if not 0 <= src < members:
        raise CollectiveError(f"got src={src}: axis {axis!r} has the members 0 to {members - 1}.")
    leaves, treedef = flat_leaves(tree)

    def from_source(leaf: Any) -> Any:
        bits = bits_of(leaf)
        return jnp.where(lax.axis_index(axis) == src, bits, jnp.zeros_like(bits))

    with jax.enable_x64(True):
        total = lax.psum([along(from_source(leaf), axis) for leaf in leaves], axis)
        return treedef.unflatten(map(from_bits, total, leaves))


def all_gather(tree: Any, axis: Axis, stacked: bool) -> Any:
    """See `tdbridge.collectives.all_gather`."""
    members, (leaves, treedef) = members_of(axis), flat_leaves(tree)
    with jax.enable_x64(True):
        return given_back(tree, treedef, gathered_rows(leaves, axis), members, stacked)


def all_to_all(trees: Any, axis: Axis, stacked: bool) -> Any:
    """See `tdbridge.collectives.all_to_all`."""
    members = members_of(axis)
    rows, treedef, first = rows_of(trees, members, "all_to_all")
    with jax.enable_x64(True):
        return given_back(first, treedef, exchanged_rows(rows, axis), members, stacked)


def members_of(axis: Axis) -> int:
    """The number of members of an axis.

    Raises:
        CollectiveError: there is no such axis here.
    """
    try:
        return lax.axis_size(axis)
    except NameError:
        raise CollectiveError(
            f"got group={axis!r}, which is no axis here: call this inside of jax.shard_map over a "
            "mesh that has it, or of jax.vmap(..., axis_name=...)."
        ) from None
