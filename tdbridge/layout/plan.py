"""Tree -> Layout, computed once per structure."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from tdbridge.errors import LeafTypeError
from tdbridge.layout.dtensors import has_dtensors, local_node
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.spec import Layout, NodeSpec, Path, make_layout, path_str
from tdbridge.layout.tree import Node, leaves_of, paths_of, tree_of, walk_nodes


class Plan(NamedTuple):
    """A Layout, and where the leaves of one tree go in it.

    Attributes:
        skeleton: the tree that it is a plan of, as `skeleton_of` gives it.
        layout: the layout of the tree, without its non-tensor values: they move no byte, and one
            that changes with each batch, as a counter does, must not cost a new plan each time.
        order: for the i-th leaf in the tree's own order, its index in `layout.leaves`.
        placed: brings what is given in the tree's own order in that of the layout.
    """

    skeleton: Any
    layout: Layout
    order: tuple[int, ...]
    placed: Callable[[Sequence[Any]], tuple[Any, ...]]


def layout_of(tree: Any) -> Layout:
    """The layout of a TensorDict, a tensorclass or an ArrayDict: where its bytes would live.

    Reads shapes and dtypes only. The tree need not be consolidated; when it is, its leaves lie at
    these offsets. The result is cached per structure. Of a tree with DTensors it is that of the
    local shards, without batch sizes, which are those of the global shapes.

    Raises:
        LeafTypeError: a leaf or a node cannot be laid out; the error names it.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> layout = layout_of(TensorDict(b=torch.zeros(3), a=torch.zeros(2, dtype=torch.int64)))
        >>> [(leaf.path, leaf.dtype, leaf.offset) for leaf in layout.leaves]
        [(('b',), 'float32', 0), (('a',), 'int64', 64)]
        >>> layout.nbytes
        128
    """
    node = tree_of(tree)
    return full_layout(local_node(node) if has_dtensors(leaves_of(node)) else node)


def full_layout(node: Node) -> Layout:
    """The layout of a described tree, its non-tensor values included."""
    return with_constants(plan_of(node).layout, constants_of(node))


def constants_of(node: Node) -> tuple[tuple[Path, Any], ...]:
    """The non-tensor values of each node that has any, sorted by its path."""
    found = [(path, child.constants) for path, child in walk_nodes(node) if child.constants]
    return tuple(sorted(found, key=lambda item: item[0]))


def with_constants(layout: Layout, constants: tuple[tuple[Path, Any], ...]) -> Layout:
    """A layout with the non-tensor values that `constants_of` found."""
    return _with_constants(layout, constants, ()) if constants else layout


def with_own_constants(layout: Layout, constants: tuple[tuple[Path, Any], ...]) -> Layout:
    """As `with_constants`, for a tree that is read: with the values of no other tree.

    A list that is equal now can be written to later.
    """
    values = [constant.value for _, own in constants for _, constant in own]
    own = tuple([id(value) for value in values if type(value) not in _FIXED])
    return _with_constants(layout, constants, own) if constants else layout


_FIXED = {type(None), bool, int, float, str, bytes}


@lru_cache(maxsize=64)
def _with_constants(
    layout: Layout, constants: tuple[tuple[Path, Any], ...], _values: tuple[int, ...]
) -> Layout:
    """Cached by the constants, and by `_values` too, the identities of those that may change."""
    found = dict(constants)
    nodes = [replace(node, constants=found.get(node.path, ())) for node in layout.nodes]
    return Layout(layout.leaves, tuple(nodes))


def plan_of(node: Node) -> Plan:
    """The plan of a described tree, from the cache when its structure was seen before."""
    leaves = leaves_of(node)
    try:
        types = tuple(map(_dtype, leaves)), tuple(map(_shape, leaves))
    except (AttributeError, RuntimeError):  # a strided nested tensor has no shape
        raise _error_of(node, leaves) from None
    return _plan(skeleton_of(node), *types)


_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


def skeleton_of(node: Node) -> tuple[Any, ...]:
    """A tree without leaves and non-tensor values, hashable; keys in the tree's own order."""
    nested = tuple([(key, skeleton_of(child)) for key, child in node.nested])
    return node.cls, node.batch_size, node.names, node.unbatched, node.keys, nested


def _error_of(node: Node, leaves: Sequence[Any]) -> LeafTypeError:
    """Names the leaf that has no dtype or no shape."""
    for path, leaf in zip(paths_of(node), leaves, strict=True):
        try:
            _ = leaf.dtype, leaf.shape
        except (AttributeError, RuntimeError):
            where, kind = path_str(path), type(leaf).__name__
            return LeafTypeError(f"{where}: got a {kind} without a dtype or a shape.")
    raise AssertionError  # pragma: no cover - one of them has just raised


@lru_cache(maxsize=1024)
def _plan(skeleton: Any, dtypes: Sequence[Any], shapes: Sequence[Any]) -> Plan:
    nodes, paths = parts_of(skeleton)
    rows = [_row(*row) for row in zip(paths, dtypes, shapes, strict=True)]
    return plan_of_rows(skeleton, rows, nodes)


def plan_of_rows(
    skeleton: Any, rows: Sequence[tuple[Path, str, tuple[int, ...]]], nodes: Sequence[NodeSpec]
) -> Plan:
    """The plan of a tree that is known by its parts alone.

    Args:
        skeleton: the tree, as `skeleton_of` gives it.
        rows: its leaves in its own order, each a (path, dtype name, shape).
        nodes: its nodes.
    """
    layout = make_layout(rows, nodes)
    index = {leaf.path: i for i, leaf in enumerate(layout.leaves)}
    order = [index[path] for path, _, _ in rows]
    places = sorted(range(len(order)), key=order.__getitem__)
    # Of one place, `itemgetter` would give the item and no tuple.
    placed = itemgetter(*places) if len(places) > 1 else tuple
    return Plan(skeleton, layout, tuple(order), placed)


def recast(plan: Plan, dtypes: Sequence[str | None]) -> Plan:
    """The plan of the same tree with leaves of other dtypes.

    Args:
        plan: the plan of the tree.
        dtypes: for each leaf of its layout the name of another dtype, or None.
    """
    rows = [
        (leaf.path, dtype or leaf.dtype, leaf.shape)
        for leaf, dtype in zip(plan.layout.leaves, dtypes, strict=True)
    ]
    return plan_of_rows(plan.skeleton, [rows[i] for i in plan.order], plan.layout.nodes)


@lru_cache(maxsize=256)
def of_class(plan: Plan, cls: type) -> Plan:
    """The plan of the same tree with a root of another class."""
    root, *below = plan.layout.nodes
    layout = Layout(plan.layout.leaves, (replace(root, cls=cls), *below))
    return plan._replace(skeleton=(cls, *plan.skeleton[1:]), layout=layout)


def parts_of(skeleton: Any, start: Path = ()) -> tuple[list[NodeSpec], list[Path]]:
    """The nodes of a skeleton, parents first, and the paths of its leaves in the tree's own order.

    Args:
        skeleton: what `skeleton_of` gives.
        start: the path of the tree itself.
    """
    nodes: list[NodeSpec] = []
    paths: list[Path] = []
    _collect(skeleton, start, paths, nodes)
    return nodes, paths


def _collect(skeleton: Any, path: Path, paths: list[Path], nodes: list[NodeSpec]) -> None:
    cls, batch_size, names, unbatched, keys, nested = skeleton
    nodes.append(NodeSpec(path, cls, batch_size, names, unbatched=tuple(sorted(unbatched))))
    paths += [(*path, key) for key in keys]
    for key, child in nested:
        _collect(child, (*path, key), paths, nodes)


def _row(path: Path, dtype: Any, shape: Any) -> tuple[Path, str, tuple[int, ...]]:
    if not all(type(size) is int for size in shape):  # that of a ragged tensor is a symbol
        raise LeafTypeError(f"{path_str(path)}: got a leaf of shape {shape}: pad it first.")
    return path, _dtype_name(path, dtype), tuple(shape)


def _dtype_name(path: Path, dtype: torch.dtype | Any) -> str:
    try:
        return dtype_of(dtype).name
    except LeafTypeError as error:
        raise LeafTypeError(f"{path_str(path)}: {error}") from None
