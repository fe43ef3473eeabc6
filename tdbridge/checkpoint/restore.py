"""From leaves and nodes back to a tree of one framework."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection

from tdbridge.checkpoint.leaves import as_array, as_tensor, is_array
from tdbridge.checkpoint.names import nest, show
from tdbridge.checkpoint.sidecar import FILE, KINDS, Node, Path
from tdbridge.convert import to_jax
from tdbridge.errors import CheckpointError
from tdbridge.layout.non_tensors import entry_of

_MakeNode = Callable[[dict[str, Any], Path], Any]


def restore(leaves: Mapping[Path, Any], nodes: Mapping[Path, Node], to: str) -> Any:
    """Builds the tree, as `load` describes it.

    Raises:
        CheckpointError: the sidecar describes another tree, or the framework lacks a dtype.
        NarrowingError: a 64-bit leaf would lose values in JAX.
    """
    tree = nest(_with_empty(leaves, nodes))
    for path, node in nodes.items():
        _check_node(tree, path, node)
    if to == "numpy":
        return _rebuild(tree, nodes, as_array, lambda children, _: children)
    everywhere = _is_mappings_only(tree)

    def make(children: dict[str, Any], path: Path) -> Any:
        node = nodes.get(path)
        is_tensordict = everywhere or (node is not None and node.kind == "tensordict")
        return _tensordict(children, node, path) if is_tensordict else children

    result = _rebuild(tree, nodes, as_tensor, make)
    return to_jax(result) if to == "jax" else result


def _with_empty(leaves: Mapping[Path, Any], nodes: Mapping[Path, Node]) -> dict[Path, Any]:
    """Adds the empty dicts, which DCP leaves out."""
    known = {path[:i] for path in leaves for i in range(len(path) + 1)}
    empty = {
        path: {}
        for path, node in nodes.items()
        if KINDS[node.kind] is dict and path not in known and not _is_below(path, leaves)
    }
    return {**leaves, **empty}


def _is_below(path: Path, leaves: Mapping[Path, Any]) -> bool:
    return any(path[:i] in leaves for i in range(len(path)))


def _check_node(tree: Any, path: Path, node: Node) -> None:
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            tree = None
    if not isinstance(tree, KINDS[node.kind]):
        raise CheckpointError(
            f"{FILE} describes another tree: it says that {show(path)} is a {node.kind}, got "
            f"{type(tree).__name__}. Delete it to load without batch sizes and tuples."
        )


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(type(key) is str for key in value)


def _is_mappings_only(tree: Any) -> bool:
    """Whether the whole tree can be a TensorDict, which holds no list."""
    if _is_mapping(tree):
        return all(map(_is_mappings_only_or_leaf, tree.values()))
    return False


def _is_mappings_only_or_leaf(value: Any) -> bool:
    return (
        _is_mappings_only(value) if isinstance(value, dict) else not isinstance(value, list | tuple)
    )


def _rebuild(
    value: Any,
    nodes: Mapping[Path, Node],
    convert: Callable[[Any, str], Any],
    make: _MakeNode,
    path: Path = (),
) -> Any:
    """Converts the leaves of nested dicts and lists, and makes each dict what it was."""
    if _is_mapping(value):
        items = value.items()
        children = {k: _rebuild(v, nodes, convert, make, (*path, k)) for k, v in items}
        return make(children, path)
    if isinstance(value, list | tuple):
        parts = [_rebuild(v, nodes, convert, make, (*path, i)) for i, v in enumerate(value)]
        node = nodes.get(path)
        is_tuple = isinstance(value, tuple) or (node is not None and node.kind == "tuple")
        return tuple(parts) if is_tuple else parts
    return convert(value, show(path)) if is_array(value) else value


def _tensordict(children: dict[str, Any], node: Node | None, path: Path) -> TensorDict:
    size = node.batch_size if node is not None else ()
    entries = {key: _entry(value, size) for key, value in children.items()}
    try:
        result = TensorDict(entries, batch_size=size)
        if node is not None and node.names is not None:
            result.names = list(node.names)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{FILE} says that {show(path)} has batch size {size} and names "
            f"{node and node.names}, which does not fit: {error}. Delete it to load without."
        ) from error
    return result


def _entry(value: Any, batch_size: tuple[int, ...]) -> Any:
    is_entry = isinstance(value, torch.Tensor) or is_tensor_collection(value)
    return value if is_entry else entry_of(value, batch_size)
