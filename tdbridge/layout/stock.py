"""The metadata that stock tensordict reads, made from a Layout.

Per leaf: (dtype, shape, start, stop, pad). Source: tensordict's consolidated format, which
`TensorDict.from_consolidated`, pickle and `send` read.
"""

import json
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from tensordict import TensorDict, is_tensorclass

from tdbridge._compat.tensordict import STOCK_DTYPES
from tdbridge.errors import LayoutError
from tdbridge.layout.classes import class_name
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.spec import Layout, Path, path_str
from tdbridge.layout.tree import Node, walk_nodes

# A nested tensordict is recorded under its own key, beside these.
_RESERVED = frozenset(("cls", "non_tensors", "leaves", "cls_metadata", "size"))
_RAGGED = "<NJT"  # how stock marks the parts of a ragged tensor


def stock_metadata(tree: Node, layout: Layout) -> dict[str, Any]:
    """The metadata of one consolidated tree.

    A fresh dict each time: stock writes into it (batch sizes, and keys of its own on broadcast).
    """
    return _node_metadata(tree, _leaf_tables(layout), ())


class AddedDtype(str):
    """The name of a dtype that stock's table has where tdbridge is imported.

    Unpickled, it imports tdbridge: the names of stock's own table are plain strings.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return AddedDtype, (str(self),)


@lru_cache(maxsize=256)
def _leaf_tables(layout: Layout) -> dict[Path, dict[str, tuple[Any, ...]]]:
    tables: dict[Path, dict[str, tuple[Any, ...]]] = {}
    for leaf in layout.leaves:
        name = str(dtype_of(leaf.dtype).in_torch)
        stock = name if name in STOCK_DTYPES else AddedDtype(name)
        row = (stock, list(leaf.shape), leaf.offset, leaf.stop, 0)
        tables.setdefault(leaf.path[:-1], {})[leaf.path[-1]] = row
    return tables


def _node_metadata(node: Node, tables: dict[Path, dict[str, Any]], path: Path) -> dict[str, Any]:
    table = tables.get(path, {})
    where = str(device) if (device := getattr(node.source, "device", None)) is not None else None
    # A tensorclass at the root holds a TensorDict, which carries the metadata.
    cls = TensorDict if not path and is_tensorclass(node.cls) else node.cls
    metadata: dict[str, Any] = {
        "cls": "TensorDict" if cls is TensorDict else cls,
        "non_tensors": {
            key: (constant.value, list(node.batch_size), where) for key, constant in node.constants
        },
        "leaves": {key: table[key] for key in node.keys},
        "cls_metadata": {
            "device": where,
            "names": list(node.names or [None] * len(node.batch_size)),
            "batch_size": list(node.batch_size),
            "is_locked": True,
        },
    }
    nested = {key: _node_metadata(child, tables, (*path, key)) for key, child in node.nested}
    if _has_stock_name(node):
        return _escaped(metadata, nested, cls)
    return metadata | nested


def _has_stock_name(node: Node) -> bool:
    return any(key in _RESERVED for key, _ in node.nested) or _any_ragged(node.keys)


@lru_cache(maxsize=1024)
def _any_ragged(keys: tuple[str, ...]) -> bool:
    return any(key.startswith(_RAGGED) for key in keys)


# A leaf or a nested tensordict with a name that stock uses itself is recorded, with all others of
# its node, under another name, and the class of the node is one that gives the names back.


@dataclass(frozen=True)
class EscapedClass:
    """Stands in metadata for `cls`, where entries of the node have `prefix` before their names."""

    cls: Any
    prefix: str

    @property
    def _is_tensorclass(self) -> bool:  # stock asks this of a class
        return is_tensorclass(self.cls)

    def _from_dict_validated(self, entries: Mapping[str, Any], **metadata: Any) -> Any:
        named = {key.removeprefix(self.prefix): value for key, value in entries.items()}
        return self.cls._from_dict_validated(named, **metadata)


class EscapedNode(UserDict[str, Any]):
    """The metadata of a tensordict under another name: no dict, or stock would look it up."""


torch.serialization.add_safe_globals([AddedDtype, EscapedClass, EscapedNode])


def _escaped(metadata: dict[str, Any], nested: dict[str, Any], cls: type) -> dict[str, Any]:
    prefix = "="
    while any(key.startswith(prefix) for key in metadata["non_tensors"]):
        prefix += "="
    leaves = {prefix + key: row for key, row in metadata["leaves"].items()}
    children = {prefix + key: EscapedNode(child) for key, child in nested.items()}
    return metadata | {"cls": EscapedClass(cls, prefix), "leaves": leaves} | children


def file_suffix(tree: Node, layout: Layout) -> bytes:
    """What follows the buffer in a file: the metadata as JSON, and its length in 8 bytes.

    Raises:
        LayoutError: stock metadata has no words for the tree, or JSON has none for a value in it.
    """
    if (reason := _why_not_in_file(tree, layout)) is not None:
        raise LayoutError(f"{reason}, which a file for from_consolidated cannot hold.")
    for path, node in walk_nodes(tree):
        for key, constant in node.constants:
            _check_json((*path, key), constant.value)
    text = json.dumps(stock_metadata(tree, layout), default=str).encode()
    return text + len(text).to_bytes(8, "little")


def _why_not_in_file(tree: Node, layout: Layout) -> str | None:
    for leaf in layout.leaves:
        if str(dtype_of(leaf.dtype).torch) not in STOCK_DTYPES:
            return f"{path_str(leaf.path)} is of dtype {leaf.dtype}"
    for path, node in walk_nodes(tree):
        if node.cls is not TensorDict and not is_tensorclass(node.cls):
            return f"the tensordict at {path_str(path)} is of class {class_name(node.cls)}"
        for key, _ in node.nested:
            if key in _RESERVED:
                return f"a nested tensordict is named {path_str((*path, key))}"
        for key in node.keys:
            if key.startswith(_RAGGED):
                return f"a leaf is named {path_str((*path, key))}"
    return None


def _check_json(path: Path, value: Any) -> None:
    if not _survives_json(value):
        raise LayoutError(
            f"{path_str(path)}: got a {type(value).__name__} that JSON would not give back. "
            "Use None, bool, int, float, str, or lists and str-keyed dicts of them."
        )


def _survives_json(value: Any) -> bool:
    """Whether value and type come back. Subclasses (enums, numpy's float64) do not."""
    if type(value) is dict:
        return all(type(key) is str and _survives_json(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_survives_json, value))
    return value is None or type(value) in (bool, int, float, str)
