"""The metadata that stock tensordict reads, made from a Layout.

Per leaf: (dtype, shape, start, stop, pad). Source: tensordict's consolidated format, which
`TensorDict.from_consolidated`, pickle and `send` read.
"""

import json
from functools import lru_cache
from typing import Any

import torch
from tensordict import TensorDict

from tdbridge._compat.tensordict import dtype_names
from tdbridge.errors import LayoutError
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.spec import Layout, Path, path_str
from tdbridge.layout.tree import Node, walk_nodes

# A nested tensordict is recorded under its own key, beside these.
_RESERVED = frozenset(("cls", "non_tensors", "leaves", "cls_metadata", "size"))


def stock_metadata(
    tree: Node, layout: Layout, device: torch.device | None
) -> dict[str, Any] | None:
    """The metadata of one consolidated tree, or None when stock has no words for it.

    A fresh dict each time: stock writes into it (batch sizes, and keys of its own on broadcast).
    """
    if why_not_stock(tree, layout) is not None:
        return None
    return _node_metadata(tree, _leaf_tables(layout), (), device)


def why_not_stock(tree: Node, layout: Layout) -> str | None:
    """Why stock metadata cannot describe this tree, or None when it can."""
    names = dtype_names()
    for leaf in layout.leaves:
        if str(dtype_of(leaf.dtype).torch) not in names:
            return f"{path_str(leaf.path)} is of dtype {leaf.dtype}"
    for path, _ in walk_nodes(tree):
        if path and path[-1] in _RESERVED:
            return f"a nested tensordict is named {path_str(path)}"
    return None


@lru_cache(maxsize=256)
def _leaf_tables(layout: Layout) -> dict[Path, dict[str, tuple[Any, ...]]]:
    tables: dict[Path, dict[str, tuple[Any, ...]]] = {}
    for leaf in layout.leaves:
        row = (str(dtype_of(leaf.dtype).in_torch), list(leaf.shape), leaf.offset, leaf.stop, 0)
        tables.setdefault(leaf.path[:-1], {})[leaf.path[-1]] = row
    return tables


def _node_metadata(
    node: Node, tables: dict[Path, dict[str, Any]], path: Path, device: torch.device | None
) -> dict[str, Any]:
    table = tables.get(path, {})
    where = str(device) if getattr(node.source, "device", None) is not None else None
    metadata: dict[str, Any] = {
        # A tensorclass at the root holds a TensorDict, which carries the metadata.
        "cls": "TensorDict" if node.cls is TensorDict or not path else node.cls,
        "non_tensors": {
            key: (constant.value, list(node.batch_size), where) for key, constant in node.constants
        },
        "leaves": {key: table[key] for key, value in node.children if not isinstance(value, Node)},
        "cls_metadata": {
            "device": where,
            "names": list(node.names or [None] * len(node.batch_size)),
            "batch_size": list(node.batch_size),
            "is_locked": True,
        },
    }
    for key, value in node.children:
        if isinstance(value, Node):
            metadata[key] = _node_metadata(value, tables, (*path, key), device)
    return metadata


def file_suffix(tree: Node, layout: Layout) -> bytes:
    """What follows the buffer in a file: the metadata as JSON, and its length in 8 bytes.

    Raises:
        LayoutError: stock metadata has no words for the tree, or JSON has none for a value in it.
    """
    if (reason := why_not_stock(tree, layout)) is not None:
        raise LayoutError(f"{reason}, which a file for from_consolidated cannot hold.")
    for path, node in walk_nodes(tree):
        for key, constant in node.constants:
            _check_json((*path, key), constant.value)
    metadata = _node_metadata(tree, _leaf_tables(layout), (), torch.device("cpu"))
    text = json.dumps(metadata, default=str).encode()
    return text + len(text).to_bytes(8, "little")


def _check_json(path: Path, value: Any) -> None:
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise LayoutError(
            f"{path_str(path)}: got a {type(value).__name__} that JSON would not give back. "
            "Use None, bool, int, float, str, or lists and str-keyed dicts of them."
        )
