"""One view of every kind of tree: a node is a class, a batch size, names, constants, children."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from tdbridge._compat import tensordict as compat
from tdbridge.errors import LeafTypeError
from tdbridge.layout.classes import is_supported
from tdbridge.layout.constants import Constant
from tdbridge.layout.spec import Path, path_str


@dataclass(slots=True)
class Node:
    """One tensordict, tensorclass or ArrayDict, described.

    Attributes:
        source: what is described.
        cls: its torch-side class.
        batch_size: its batch size.
        names: a name or None per batch dimension, or None when no dimension has one.
        constants: its non-tensor entries, sorted by key.
        children: its other entries, in its own order: leaves, and nested trees (as `Node` once
            `tree_of` has described them too).
    """

    source: Any
    cls: type
    batch_size: tuple[int, ...]
    names: tuple[str | None, ...] | None
    constants: tuple[tuple[str, Constant], ...]
    children: list[tuple[str, Any]]


@singledispatch
def node_of(tree: Any) -> Node:
    """Describes one level of `tree`; the nested trees among its children are left as they are.

    Raises:
        LeafTypeError: `tree` is of a kind that is not carried.
    """
    if is_supported(type(tree)):
        return _tensordict_node(tree)
    advice = (
        "call `.contiguous()` or `.to_tensordict()` first"
        if is_tensor_collection(tree)
        else ("expected a TensorDict, a tensorclass or an ArrayDict")
    )
    raise LeafTypeError(f"got a {type(tree).__name__}, which is not carried as a tree: {advice}.")


def is_node(value: Any) -> bool:
    """Whether `value` is a tree of ours rather than a leaf."""
    cls = type(value)
    if cls is torch.Tensor:
        return False
    return is_tensor_collection(value) or node_of.dispatch(cls) is not _NO_NODE


_NO_NODE = node_of.dispatch(object)


@node_of.register(TensorDict)
def _tensordict_node(td: Any) -> Node:
    batch_size = tuple(td.batch_size)
    children, constants = [], []
    for key, value in compat.tensordict_of(td).items():
        if isinstance(value, torch.Tensor) or not is_non_tensor(value):
            children.append((key, value))
        elif is_array(data := _non_tensor_value(key, value)):
            # tensordict takes a jax array, or a bfloat16 numpy one, for a non-tensor: it is a leaf.
            children.append((key, data))
        else:
            constants.append((key, Constant(data)))
    constants.sort(key=lambda item: item[0])
    return Node(td, type(td), batch_size, names_of(td), tuple(constants), children)


def _non_tensor_value(key: str, value: Any) -> Any:
    if isinstance(value, TensorDictBase):
        raise LeafTypeError(
            f"{path_str((key,))}: got a {type(value).__name__}, one value per batch element, which "
            f"is not carried yet. Store one value instead: NonTensorData(td[{key!r}])."
        )
    while is_non_tensor(value):
        value = value.data
    return value


def is_array(value: Any) -> bool:
    """Whether `value` is an array of JAX or of ml_dtypes, which torch cannot take as it is."""
    if isinstance(value, np.ndarray):
        return (
            value.dtype.kind == "V"
            and value.dtype.names is None
            and value.dtype.type is not np.void
        )
    return hasattr(value, "dtype") and hasattr(value, "sharding")


def names_of(td: TensorDictBase) -> tuple[str | None, ...] | None:
    """The names of the batch dimensions, or None when none has one."""
    names = tuple(td.names or ())
    return names if any(name is not None for name in names) else None


def tree_of(tree: Any, path: Path = ()) -> Node:
    """Describes `tree` at every level.

    Raises:
        LeafTypeError: a node is of a kind that is not carried; the error names its path.
    """
    try:
        node = node_of(tree)
    except LeafTypeError as error:
        raise LeafTypeError(f"{path_str(path)}: {error}") if path else error from None
    node.children = [
        (key, tree_of(value, (*path, key)) if is_node(value) else value)
        for key, value in node.children
    ]
    return node


def walk_leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each leaf with its path, in the tree's own order."""
    for key, value in node.children:
        if isinstance(value, Node):
            yield from walk_leaves(value, (*path, key))
        else:
            yield (*path, key), value


def walk_nodes(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Each node with its path, parents first."""
    yield path, node
    for key, value in node.children:
        if isinstance(value, Node):
            yield from walk_nodes(value, (*path, key))


def rebuild(node: Node, leaves: Iterator[Any], device: torch.device | None = None) -> Any:
    """The same tree, as TensorDicts, over other leaves.

    Args:
        node: a tree that `tree_of` described.
        leaves: one per leaf of `node`, in its order.
        device: the device of the new leaves: each node that had a device gets this one.
    """
    entries = {
        key: rebuild(value, leaves, device) if isinstance(value, Node) else next(leaves)
        for key, value in node.children
    }
    if node.constants:
        values = {k: compat.non_tensor(c.value, node.batch_size) for k, c in node.constants}
        entries = {key: {**entries, **values}[key] for key in list(node.source.keys())}
    has_device = getattr(node.source, "device", None) is not None
    return compat.new_tensordict(
        node.cls,
        entries,
        batch_size=node.batch_size,
        names=node.names,
        device=device if has_device else None,
    )
