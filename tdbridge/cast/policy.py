"""Which leaves of a tree are cast, and to which dtype: judged by path, dtype and shape alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_floating

from tdbridge.errors import LeafTypeError
from tdbridge.layout.dtypes import DType, dtype_of
from tdbridge.layout.plan import parts_of, skeleton_of
from tdbridge.layout.spec import Layout, Path
from tdbridge.layout.tree import Node, leaves_of, walk_nodes

Where = Callable[..., Any]
Keep = str | Iterable[str] | Mapping[str, Any] | Callable[[Path], Any] | None
Rule = tuple[str | Callable[[Path], Any], DType | None]
Own = tuple[Where, Path] | None


class Policy(NamedTuple):
    """What `cast` was asked for.

    Attributes:
        dtype: what leaves are cast to.
        where: which leaves, by dtype.
        rules: globs or predicates of paths, each with another dtype, or None for "as it is".
    """

    dtype: DType
    where: Where
    rules: tuple[Rule, ...] = ()


def policy_of(dtype: Any, where: Where = is_floating, keep: Keep = None) -> Policy:
    """The arguments of `cast`, checked and made hashable.

    Raises:
        LeafTypeError: a dtype is none that `cast` casts to.
    """
    return Policy(dtype_for(dtype), where, tuple(_rules(keep)))


def dtype_for(dtype: Any) -> DType:
    """The dtype that a user names: one of torch, numpy or JAX, or its name.

    Raises:
        LeafTypeError: there is no such dtype on both sides, or it is one of integers.
    """
    found = dtype_of(dtype if isinstance(dtype, (str, torch.dtype)) else _numpy_dtype(dtype))
    if not found.crosses:
        raise LeafTypeError(f"got dtype {found.name}, which torch and JAX do not both have.")
    if not (found.in_torch.is_floating_point or found.in_torch.is_complex):
        raise LeafTypeError(
            f"got dtype {found.name}: expected one of floating-point or complex numbers."
        )
    return found


def _numpy_dtype(dtype: Any) -> np.dtype:
    """`jnp.bfloat16` and `np.float32` are types of scalars, and no dtypes yet."""
    try:
        return np.dtype(dtype)
    except TypeError:
        raise LeafTypeError(f"got {dtype!r}, which is no dtype.") from None


def _rules(keep: Keep) -> Iterable[Rule]:
    if isinstance(keep, Mapping):
        for glob, dtype in keep.items():
            yield glob, None if dtype is None else dtype_for(dtype)
    elif isinstance(keep, str) or callable(keep):
        yield keep, None
    else:
        yield from ((rule, None) for rule in keep or ())


class Targets(NamedTuple):
    """What the leaves of a tree are cast to.

    Attributes:
        each: the dtype of each leaf, None where it stays.
        groups: each dtype with the positions of its leaves.
    """

    each: tuple[DType | None, ...]
    groups: tuple[tuple[DType, tuple[int, ...]], ...]


def grouped(each: Sequence[DType | None]) -> Targets:
    """The targets of some leaves, grouped."""
    groups: dict[DType, list[int]] = {}
    for i, dtype in enumerate(each):
        if dtype is not None:
            groups.setdefault(dtype, []).append(i)
    return Targets(tuple(each), tuple([(dtype, tuple(at)) for dtype, at in groups.items()]))


def targets_of(node: Node, policy: Policy, start: Path = ()) -> Targets:
    """What each leaf of a tree is cast to, in the order of `leaves_of`.

    Args:
        node: the described tree.
        policy: what was asked for.
        start: the path of the tree itself.
    """
    leaves, filtered = leaves_of(node), any(_own_filter(n.cls) for _, n in walk_nodes(node))
    dtypes = _dtypes(leaves)
    # Only the filter of a class is given a shape, and hashing a thousand of them takes its time.
    shapes = tuple([getattr(leaf, "shape", ()) for leaf in leaves]) if filtered else None
    return _targets_of(skeleton_of(node), policy, start, dtypes, shapes)


_dtype = attrgetter("dtype")


def _dtypes(leaves: Sequence[Any]) -> tuple[Any, ...]:
    try:
        return tuple(map(_dtype, leaves))
    except AttributeError:  # one of them is no array
        return tuple([getattr(leaf, "dtype", None) for leaf in leaves])


@lru_cache(maxsize=256)
def _targets_of(
    skeleton: Any,
    policy: Policy,
    start: Path,
    dtypes: Sequence[Any],
    shapes: Sequence[Any] | None,
) -> Targets:
    nodes, paths = parts_of(skeleton, start)
    owners = _owners(((node.path, node.cls) for node in nodes), paths)
    return _targets(policy, paths, dtypes, shapes, owners)


@lru_cache(maxsize=256)
def targets_in(
    layout: Layout, policy: Policy, start: Path = (), dtypes: Sequence[Any] | None = None
) -> Targets:
    """The same of a tree with this layout, in the order of the layout.

    Args:
        layout: the layout of the tree.
        policy: what was asked for.
        start: the path of the tree itself.
        dtypes: those of its segments, if they were cast since.
    """
    leaves = layout.leaves
    paths = tuple([(*start, *leaf.path) for leaf in leaves])
    owners = _owners((((*start, *node.path), node.cls) for node in layout.nodes), paths)
    names = [segment.dtype for segment in layout.segments]
    now = dict(zip(names, dtypes or names, strict=True))
    shapes = tuple([leaf.shape for leaf in leaves])
    return _targets(policy, paths, tuple([now[leaf.dtype] for leaf in leaves]), shapes, owners)


def _targets(
    policy: Policy,
    paths: Sequence[Path],
    dtypes: Sequence[Any],
    shapes: Sequence[Any] | None,
    owners: Sequence[Own],
) -> Targets:
    sizes = shapes or [()] * len(paths)
    filters = owners or [None] * len(paths)
    leaves = zip(paths, dtypes, sizes, filters, strict=True)
    return grouped([target(policy, *leaf) for leaf in leaves])


def target(
    policy: Policy, path: Path, dtype: Any, shape: Sequence[int] = (), own: Own = None
) -> DType | None:
    """What the leaf at `path` is cast to, or None when it stays as it is.

    Args:
        policy: what was asked for.
        path: the path of the leaf in the whole tree.
        dtype: its dtype, of torch or numpy.
        shape: its shape.
        own: the `cast_filter` of the class that the leaf is in, and the path of that node.
    """
    try:
        source = dtype_of(dtype)
    except LeafTypeError:  # PRNG keys, float0, no array at all: no numbers to be cast
        return None
    wanted = _wanted(policy, path)
    if wanted is None or wanted is source or not source.crosses:
        return None
    if source.in_torch.is_complex and not wanted.in_torch.is_complex:
        return None
    return wanted if _is_chosen(policy, path, source.in_torch, shape, own) else None


def _wanted(policy: Policy, path: Path) -> DType | None:
    for rule, dtype in policy.rules:
        if rule(path) if callable(rule) else _matches(path, rule):
            return dtype
    return policy.dtype


def _matches(path: Path, glob: str) -> bool:
    """Whether the glob matches the path, or that of a node above it."""
    return any(fnmatchcase("/".join(path[:stop]), glob) for stop in range(1, len(path) + 1))


def _is_chosen(
    policy: Policy, path: Path, dtype: torch.dtype, shape: Sequence[int], own: Own
) -> bool:
    stand_in = torch.empty(tuple(shape), dtype=dtype, device="meta")
    if own is not None and policy.where is is_floating:
        where, start = own
        return bool(where(path[len(start) :], stand_in))  # as stock calls it
    return bool(policy.where(stand_in))


def _own_filter(cls: type) -> Where | None:
    return getattr(cls, "_cast_filter", None)


def _owners(nodes: Iterable[tuple[Path, type]], paths: Sequence[Path]) -> tuple[Own, ...]:
    """Per leaf the `cast_filter` of the nearest class above it; empty where no class has one.

    Args:
        nodes: path and class of each node, parents first.
        paths: those of the leaves.
    """
    found: dict[Path, Own] = {}
    for path, cls in nodes:
        own = _own_filter(cls)
        found[path] = found.get(path[:-1]) if own is None else (own, path)
    return tuple([found[path[:-1]] for path in paths]) if any(found.values()) else ()
