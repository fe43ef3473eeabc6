"""Tree -> Layout, computed once per structure."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tdbridge.errors import LeafTypeError
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.spec import Layout, NodeSpec, Path, make_layout, path_str
from tdbridge.layout.tree import Node, tree_of


class Plan(NamedTuple):
    """A Layout, and where the leaves of one tree go in it.

    Attributes:
        layout: the layout of the tree.
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
    return plan_of(tree_of(tree)).layout


def plan_of(node: Node) -> Plan:
    """The plan of a described tree, from the cache when its structure was seen before."""
    return _plan(_signature(node))


def _signature(node: Node) -> tuple[Any, ...]:
    """All that the layout depends on, plus the tree's own order, hashable."""
    items = tuple(
        (key, _signature(value)) if isinstance(value, Node) else (key, *_type_of(key, value))
        for key, value in node.children
    )
    return node.cls, node.batch_size, node.names, node.constants, items


def _type_of(key: str, leaf: Any) -> tuple[Any, Any]:
    try:
        return leaf.dtype, leaf.shape
    except AttributeError:
        raise LeafTypeError(
            f"{path_str((key,))}: got a {type(leaf).__name__}, which has no dtype and no shape."
        ) from None


@lru_cache(maxsize=1024)
def _plan(signature: tuple[Any, ...]) -> Plan:
    leaves: list[tuple[Path, str, tuple[int, ...]]] = []
    nodes: list[NodeSpec] = []
    _collect(signature, (), leaves, nodes)
    layout = make_layout(leaves, nodes)
    index = {leaf.path: i for i, leaf in enumerate(layout.leaves)}
    return Plan(layout, tuple(index[path] for path, _, _ in leaves))


def _collect(signature: Any, path: Path, leaves: list[Any], nodes: list[NodeSpec]) -> None:
    cls, batch_size, names, constants, items = signature
    nodes.append(NodeSpec(path, cls, batch_size, names, constants))
    for key, *rest in items:
        if len(rest) == 1:
            _collect(rest[0], (*path, key), leaves, nodes)
        else:
            leaves.append(((*path, key), _dtype_name((*path, key), rest[0]), tuple(rest[1])))


def _dtype_name(path: Path, dtype: torch.dtype | Any) -> str:
    try:
        return dtype_of(dtype).name
    except LeafTypeError as error:
        raise LeafTypeError(f"{path_str(path)}: {error}") from None
