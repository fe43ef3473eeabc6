"""Leaves and rows in a program of JAX: what is sent, and in how many operations."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tdbridge.collectives.ops import MAX, MEAN, PRODUCT, Op
from tdbridge.collectives.stacks import check_stacks, parts_of
from tdbridge.collectives.wire import Where, takes_part
from tdbridge.convert.leaves import with_paths
from tdbridge.errors import CollectiveError, LeafTypeError
from tdbridge.layout.dtypes import DType, dtype_of
from tdbridge.layout.spec import path_str
from tdbridge.pytrees.packed import PackedArrayDict, over_segments

Axis = str | tuple[str, ...]
OnLeaves = Callable[[list[Any]], Sequence[Any]]


def flat_leaves(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree, of a packed one its segments.

    Raises:
        LeafTypeError: a leaf is no array.
    """
    if tree is None:
        raise refused("passing None")
    leaves, treedef = jax.tree.flatten(tree)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)) or _is_key(leaf):
            advice = "convert torch tensors by tdbridge.to_jax before, PRNG keys by key_data"
            raise LeafTypeError(f"{_paths(tree)[i]}: got a {_kind(leaf)}, no array: {advice}.")
    with jax.enable_x64(True):
        return list(map(jnp.asarray, leaves)), treedef


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _kind(leaf: Any) -> str:
    return str(leaf.dtype) if isinstance(leaf, jax.Array) else type(leaf).__name__


def _paths(tree: Any) -> list[str]:
    return [path_str(path) for path, _ in with_paths(tree, lambda _: False)]


def chosen_leaves(
    tree: Any, leaves: Sequence[Any], op: Op, where: Where | None, wide: DType | None
) -> list[int]:
    """The positions of the leaves that `where` chooses, all of which can be reduced so.

    Raises:
        CollectiveError: one cannot be. It is named.
    """
    chosen, paths = [], _paths(tree)
    for i, leaf in enumerate(leaves):
        if takes_part(dtype_of(np.dtype(leaf.dtype)), op, wide, where, paths[i]):
            chosen.append(i)
    return chosen


def along(leaf: Any, axis: Axis) -> Any:
    """A leaf that differs along some names of the axis alone, as one that differs along all."""
    names = axis if isinstance(axis, tuple) else (axis,)
    kind = jax.typeof(leaf)
    known = getattr(getattr(kind, "mat", kind), "varying", getattr(kind, "vma", ()))
    missing = tuple([name for name in names if name not in known])
    # JAX refuses a collective over names of both kinds, and does one over either by itself.
    return lax.pcast(leaf, missing, to="varying") if 0 < len(missing) < len(names) else leaf


def reduced(
    leaves: Sequence[Any], op: Op, members: int, wide: DType | None, reduce: OnLeaves
) -> list[Any]:
    """`reduce` of the leaves in dtypes that can be added up and compared; of a mean the sum."""
    sent = [leaf.astype(_sent(leaf.dtype, wide)) for leaf in leaves]
    if op.factor != 1:
        sent = [leaf * jnp.asarray(op.factor, leaf.dtype) for leaf in sent]
    new = reduce(sent) if sent else ()
    if op.name == MEAN:
        new = [value / members for value in new]
    return [value.astype(leaf.dtype) for value, leaf in zip(new, leaves, strict=True)]


def _sent(dtype: Any, wide: DType | None) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.uint8
    if jnp.issubdtype(dtype, jnp.floating):
        wider = jnp.float32 if wide is None else wide.in_numpy
        if dtype.itemsize == 1 or (wide is not None and wide.itemsize > dtype.itemsize):
            return wider
    return dtype


def bits_of(leaf: Any) -> Any:
    """A leaf as unsigned integers of its size; complex numbers as two of them."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint8)
    return lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")


def from_bits(bits: Any, like: Any) -> Any:
    """The leaf of the dtype of `like` that has these bits."""
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        return lax.complex(*lax.bitcast_convert_type(bits, like.real.dtype))
    if like.dtype == bool:
        return bits.astype(bool)
    return lax.bitcast_convert_type(bits, like.dtype)


_ADVICE = {
    "reduce": "all_reduce gives the result to every member",
    "gather": "all_gather gives the trees to every member",
    "scatter": "broadcast the trees, and let each member take its own",
    "send": "jax.lax.ppermute moves values between pairs of members",
    "recv": "jax.lax.ppermute moves values between pairs of members",
    "async_op=True": "JAX starts operations early by itself",
    "pad=True": "shapes are fixed in a program, pad before",
    "passing None": "pass a tree of zeros of the same layout",
}


def refused(what: str) -> CollectiveError:
    """What to use instead of what is another thing on each member."""
    return CollectiveError(
        f"{what} is not there over a mesh or an axis of JAX, whose members run one program: "
        f"{_ADVICE[what]}."
    )


# --- rows: leaves with a dimension in front, one row for each member


def gathered_rows(leaves: Sequence[Any], axis: Axis) -> list[Any]:
    """Each leaf of all members, as rows."""
    return joined_rows(
        [leaf[None] for leaf in leaves], lambda row: lax.all_gather(row[0], axis), 1, axis
    )


def exchanged_rows(rows: Sequence[Any], axis: Axis) -> list[Any]:
    """The rows that the members had for this one."""
    return joined_rows(rows, lambda row: lax.all_to_all(row, axis, 0, 0, tiled=True), 1, axis)


def over_rows(op: Op, rows: Sequence[Any]) -> list[Any]:
    """The largest, the smallest or the product of the rows of each leaf, in its own dtype."""
    if op.name == PRODUCT:
        return [jnp.prod(row, axis=0, dtype=row.dtype) for row in rows]
    over = jnp.max if op.name == MAX else jnp.min
    return [over(row, axis=0) for row in rows]


def joined_rows(
    rows: Sequence[Any], perform: Callable[[Any], Any], dims: int, axis: Axis
) -> list[Any]:
    """What `perform` makes of rows, those of one dtype in one operation.

    Args:
        rows: `[n, *shape]` each.
        perform: gives as many elements a row, with `dims` dimensions before.
        dims: 1 for rows, 0 for a single one.
        axis: along which they differ.
    """
    new: list[Any] = [None] * len(rows)
    for dtype in dict.fromkeys(row.dtype for row in rows):
        at = [i for i, row in enumerate(rows) if row.dtype == dtype]
        flat = [along(rows[i].reshape(len(rows[i]), -1), axis) for i in at]
        found = perform(jnp.concatenate(flat, axis=1) if len(flat) > 1 else flat[0])
        ends = np.cumsum([one.shape[1] for one in flat])[:-1].tolist()
        for i, part in zip(at, jnp.split(found, ends, axis=dims), strict=True):
            new[i] = part.reshape(*found.shape[:dims], *rows[i].shape[1:])
    return new


def rows_of(trees: Any, members: int, name: str) -> tuple[list[Any], Any, Any]:
    """The leaves of a tree for each member as rows, and the structure of one of them."""
    parts = parts_of(trees, members, name)
    flat, (treedef, *others) = zip(*map(flat_leaves, parts), strict=True)
    for i, other in enumerate(others, 1):
        if other != treedef:
            raise CollectiveError(
                f"{name}: tree {i} has another structure than tree 0: got {other}, expected "
                f"{treedef}."
            )
    return [jnp.stack(row) for row in zip(*flat, strict=True)], treedef, parts[0]


def given_back(tree: Any, treedef: Any, rows: Sequence[Any], members: int, stacked: bool) -> Any:
    """One tree over rows, or a list of trees."""
    if not stacked:
        return [treedef.unflatten([row[i] for row in rows]) for i in range(members)]
    check_stacks(tree)
    if isinstance(tree, PackedArrayDict):
        unpack = jax.vmap(lambda *segments: over_segments(tree._layout, segments).unpack())
        return unpack(*rows).pack() if rows else tree
    return treedef.unflatten(rows)
