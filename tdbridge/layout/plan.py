"""Tree -> Layout, computed once per structure."""

from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from tdbridge.errors import LeafTypeError
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.spec import Layout, NodeSpec, Path, make_layout, path_str
from tdbridge.layout.tree import Node, tree_of, walk_nodes


class Plan(NamedTuple):
    """A Layout, and where the leaves of one tree go in it.

    Attributes:
        layout: the layout of the tree, without its non-tensor values: they move no byte, and one
            that changes with each batch, as a counter does, must not cost a new plan each time.
        order: for the i-th leaf in the tree's own order, its index in `layout.leaves`.
    """

    layout: Layout
    order: tuple[int, ...]


def layout_of(tree: Any) -> Layout:
    """The layout of a TensorDict, a tensorclass or an ArrayDict: where its bytes would live.

    Reads shapes and dtypes only. The tree need not be consolidated; when it is, its leaves lie at
    these offsets. The result is cached per structure.

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
    return full_layout(tree_of(tree))


def full_layout(node: Node) -> Layout:
    """The layout of a described tree, its non-tensor values included."""
    layout, constants = plan_of(node).layout, constants_of(node)
    return _with_constants(layout, constants) if constants else layout


def constants_of(node: Node) -> tuple[tuple[Path, Any], ...]:
    """The non-tensor values of each node that has any, sorted by its path."""
    found = [(path, child.constants) for path, child in walk_nodes(node) if child.constants]
    return tuple(sorted(found, key=lambda item: item[0]))


@lru_cache(maxsize=64)
def _with_constants(layout: Layout, constants: tuple[tuple[Path, Any], ...]) -> Layout:
    found = dict(constants)
    nodes = [replace(node, constants=found.get(node.path, ())) for node in layout.nodes]
    return Layout(layout.leaves, tuple(nodes))


def plan_of(node: Node) -> Plan:
    """The plan of a described tree, from the cache when its structure was seen before."""
    return _plan(_signature(node))


_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


def _signature(node: Node, path: Path = ()) -> tuple[Any, ...]:
    """All that the places of the leaves depend on, plus the tree's own order, hashable."""
    leaves = node.leaves
    try:
        types = tuple(map(_dtype, leaves)), tuple(map(_shape, leaves))
    except (AttributeError, RuntimeError):  # a strided nested tensor has no shape
        raise _error_of(node, path) from None
    nested = tuple([(key, _signature(child, (*path, key))) for key, child in node.nested])
    return node.cls, node.batch_size, node.names, node.keys, *types, nested


def _error_of(node: Node, path: Path) -> LeafTypeError:
    """Names the leaf that has no dtype or no shape."""
    for key, leaf in zip(node.keys, node.leaves, strict=True):
        try:
            _ = leaf.dtype, leaf.shape
        except (AttributeError, RuntimeError):
            where, kind = path_str((*path, key)), type(leaf).__name__
            return LeafTypeError(f"{where}: got a {kind} without a dtype or a shape.")
    raise AssertionError  # pragma: no cover - one of them has just raised


@lru_cache(maxsize=1024)
def _plan(signature: tuple[Any, ...]) -> Plan:
    leaves: list[tuple[Path, str, tuple[int, ...]]] = []
    nodes: list[NodeSpec] = []
    _collect(signature, (), leaves, nodes)
    layout = make_layout(leaves, nodes)
    index = {leaf.path: i for i, leaf in enumerate(layout.leaves)}
    return Plan(layout, tuple(index[path] for path, _, _ in leaves))


def _collect(signature: Any, path: Path, leaves: list[Any], nodes: list[NodeSpec]) -> None:
    cls, batch_size, names, keys, dtypes, shapes, nested = signature
    nodes.append(NodeSpec(path, cls, batch_size, names))
    for key, dtype, shape in zip(keys, dtypes, shapes, strict=True):
        own = (*path, key)
        if not all(type(size) is int for size in shape):  # that of a ragged tensor is a symbol
            raise LeafTypeError(f"{path_str(own)}: got a leaf of shape {shape}: pad it first.")
        leaves.append((own, _dtype_name(own, dtype), tuple(shape)))
    for key, child in nested:
        _collect(child, (*path, key), leaves, nodes)


def _dtype_name(path: Path, dtype: torch.dtype | Any) -> str:
    try:
        return dtype_of(dtype).name
    except LeafTypeError as error:
        raise LeafTypeError(f"{path_str(path)}: {error}") from None
