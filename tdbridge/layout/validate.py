"""A layout that was read from text is checked before anything is made of it."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tdbridge.errors import LayoutError
from tdbridge.layout.classes import stands_apart

if TYPE_CHECKING:
    from tdbridge.layout.spec import Layout, NodeSpec

# What an offset in memory or in a file can be.
_LIMIT = 2**63


def read_data(text: str, version: int) -> dict[str, Any]:
    """The JSON object in `text`, of that version.

    Raises:
        LayoutError: it is no JSON object, or has another version, or a key twice.
    """
    data = json.loads(text, object_pairs_hook=_object)
    if not isinstance(data, dict):
        raise LayoutError(f"it is a {type(data).__name__}")
    found = data.get("version")
    if type(found) is not int or found != version:
        raise LayoutError(f"it is of version {found!r}, and this is a reader of version {version}")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise LayoutError("it has a key twice")
    return found


def sizes_of(data: Any) -> tuple[int, ...]:
    """The shape or batch size in `data`, safe to compute with.

    Raises:
        LayoutError: it is no list of integers from 0 to 2**63 - 1.
    """
    if not (type(data) is list and all(type(n) is int and 0 <= n < _LIMIT for n in data)):
        raise LayoutError(f"it has the shape {str(data)[:80]}")
    return tuple(data)


def check_layout(layout: "Layout") -> None:
    """Checks that the nodes form one tree that holds each leaf, and that the sizes fit.

    Raises:
        LayoutError: it is no layout that `layout_of` would make of any tree.
    """
    nodes = {node.path: node for node in layout.nodes}
    if () not in nodes:
        raise LayoutError("it has no root")
    _check_paths(layout)
    for leaf in layout.leaves:
        _check_inside(nodes, leaf.path, leaf.shape)
    leaves = {leaf.path for leaf in layout.leaves}
    for node in layout.nodes:
        _check_names(node)
        _check_unbatched(node, leaves)
        if node.path:
            _check_inside(nodes, node.path, None if stands_apart(node.cls) else node.batch_size)
    if layout.nbytes >= _LIMIT:
        raise LayoutError(f"its size is {layout.nbytes} bytes")


def _check_paths(layout: "Layout") -> None:
    paths = [
        *(leaf.path for leaf in layout.leaves),
        *(node.path for node in layout.nodes),
        *((*node.path, key) for node in layout.nodes for key, _ in node.constants),
    ]
    if not all(type(key) is str for path in paths for key in path):
        raise LayoutError("it has a key that is no text")
    if len(set(paths)) != len(paths):
        raise LayoutError("it has a path twice")


def _check_unbatched(node: "NodeSpec", leaves: set[Any]) -> None:
    keys = node.unbatched
    if list(keys) != sorted(set(keys)) or any((*node.path, key) not in leaves for key in keys):
        raise LayoutError(f"the node {list(node.path)!r} has unbatched leaves {list(keys)!r}")


def _check_inside(nodes: dict[Any, "NodeSpec"], path: Any, shape: tuple[int, ...] | None) -> None:
    """Checks that a child stands in a node, and starts with its batch size if it is batched."""
    parent = nodes.get(path[:-1]) if path else None
    if parent is None:
        raise LayoutError(f"{list(path)!r} is in no node")
    if shape is None or path[-1] in parent.unbatched:
        return
    if shape[: len(parent.batch_size)] != parent.batch_size:
        raise LayoutError(f"{list(path)!r} has shape {list(shape)} in another batch size")


def _check_names(node: "NodeSpec") -> None:
    names: Iterable[Any] | None = node.names
    if names is not None and not (
        len(node.names or ()) == len(node.batch_size)
        and all(name is None or type(name) is str for name in names)
        and any(name is not None for name in names)
    ):
        raise LayoutError(f"the node {list(node.path)!r} has names {names!r}")
