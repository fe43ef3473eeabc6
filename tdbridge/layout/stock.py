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

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensorclass

from tdbridge._compat.tensordict import STOCK_DTYPES
from tdbridge.errors import LayoutError
from tdbridge.layout.classes import Jagged, class_name
from tdbridge.layout.constants import Constant
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.non_tensors import PerElement, is_stack
from tdbridge.layout.spec import Layout, Path, path_str
from tdbridge.layout.tree import BUILDERS, Node, device_of, walk_nodes

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
    where = None if (device := device_of(node)) is None else str(device)
    prefix = _prefix(node)
    leaves = {prefix + key: tables[path][key] for key in node.keys}
    values, nested = {}, {}
    for key, constant in node.constants:
        if is_stack(constant.value, node.batch_size):
            nested[key] = _stack_metadata(constant.value.array, where)
        else:
            values[key] = constant.value, list(node.batch_size), where
    for key, child in node.nested:
        if child.cls is Jagged:
            leaves |= _jagged_rows(prefix + key, child, tables[*path, key])
        else:
            nested[key] = _node_metadata(child, tables, (*path, key))
    if node.cls is LazyStackedTensorDict:
        return _lazy_metadata(dict(node.constants)) | nested
    # A tensorclass at the root holds a TensorDict, which carries the metadata.
    cls = TensorDict if not path and is_tensorclass(node.cls) else node.cls
    stated = "TensorDict" if cls is TensorDict else cls
    return {
        "cls": EscapedClass(cls, prefix) if prefix else stated,
        "non_tensors": values,
        "leaves": leaves,
        "cls_metadata": {
            "device": where,
            "names": list(node.names or [None] * len(node.batch_size)),
            "batch_size": list(node.batch_size),
            "is_locked": True,
        },
        **{prefix + key: EscapedNode(part) if prefix else part for key, part in nested.items()},
    }


def _lazy_metadata(constants: Mapping[str, Constant]) -> dict[str, Any]:
    named = constants.get("stack_dim_name")
    name = None if named is None else named.value
    return _stack("LazyStackedTensorDict", constants["stack_dim"].value, name, {})


def _stack_metadata(values: np.ndarray, where: str | None) -> dict[str, Any]:
    """Of non-tensor values, one per element: a stack of stacks, the first dimension outermost."""
    parts = {str(i): part for i, part in enumerate(values)}
    if values.ndim > 1:
        inner = {key: _stack_metadata(part, where) for key, part in parts.items()}
        return _stack("NonTensorStack", 0, None, {}) | inner
    return _stack("NonTensorStack", 0, None, {k: (part, [], where) for k, part in parts.items()})


def _stack(cls: str, dim: int, name: str | None, values: dict[str, Any]) -> dict[str, Any]:
    metadata = {"stack_dim": dim, "stack_dim_name": name, "is_locked": True}
    return {"cls": cls, "non_tensors": values, "leaves": {}, "cls_metadata": metadata}


def _jagged_rows(key: str, node: Node, table: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The parts of a jagged tensor are leaves of the tensordict that it is in, offsets last."""
    ragged = dict(node.constants)["jagged_dim"].value
    rows = {f"<NJT_VALUES>{key}": table["values"]}
    if "lengths" in table:
        rows[f"<NJT_LENGTHS>{key}"] = table["lengths"]
    return rows | {f"<NJT_OFFSETS>{key}": (*table["offsets"], ragged)}


# A leaf or a nested tensordict with a name that stock uses itself is recorded, with all others of
# its node, under another name, and the class of the node is one that gives the names back.


def _prefix(node: Node) -> str:
    """What to put before the names of a node's leaves and nested trees; most often nothing."""
    if _RESERVED.isdisjoint(_node_keys(node)) and not _any_ragged(_leaf_keys(node)):
        return ""
    prefix = "="
    while any(key.startswith(prefix) for key, _ in node.constants):
        prefix += "="
    return prefix


def _node_keys(node: Node) -> tuple[str, ...]:
    """What stock records under its own key: tensordicts, and stacks of non-tensor values."""
    nested = [key for key, child in node.nested if child.cls is not Jagged]
    stacks = [key for key, value in node.constants if is_stack(value.value, node.batch_size)]
    return (*nested, *stacks)


def _leaf_keys(node: Node) -> tuple[str, ...]:
    """What stock records among the leaves."""
    jagged = [key for key, child in node.nested if child.cls is Jagged]
    return (*node.keys, *jagged) if jagged else node.keys


@lru_cache(maxsize=1024)
def _any_ragged(keys: tuple[str, ...]) -> bool:
    return any(key.startswith(_RAGGED) for key in keys)


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


def file_suffix(tree: Node, layout: Layout) -> bytes:
    """What follows the buffer in a file: the metadata as JSON, and its length in 8 bytes.

    Raises:
        LayoutError: stock metadata has no words for the tree, or JSON has none for a value in it.
    """
    if (reason := _why_not_in_file(tree, layout)) is not None:
        raise LayoutError(f"{reason}, which a file for from_consolidated cannot hold.")
    for path, node in walk_nodes(tree):
        for key, constant in node.constants if node.cls not in BUILDERS else ():
            _check_json((*path, key), constant.value)
    text = json.dumps(stock_metadata(tree, layout), default=str).encode()
    return text + len(text).to_bytes(8, "little")


def _why_not_in_file(tree: Node, layout: Layout) -> str | None:
    for leaf in layout.leaves:
        if str(dtype_of(leaf.dtype).torch) not in STOCK_DTYPES:
            return f"{path_str(leaf.path)} is of dtype {leaf.dtype}"
    for path, node in walk_nodes(tree):
        known = node.cls in (TensorDict, LazyStackedTensorDict, Jagged)
        if not known and not is_tensorclass(node.cls):
            return f"the tensordict at {path_str(path)} is of class {class_name(node.cls)}"
        for key in _node_keys(node):
            if key in _RESERVED:
                return f"a nested tensordict is named {path_str((*path, key))}"
        for key in _leaf_keys(node):
            if key.startswith(_RAGGED):
                return f"a leaf is named {path_str((*path, key))}"
    return None


def _check_json(path: Path, value: Any) -> None:
    if not _survives_json(value):
        kind = "NonTensorStack" if type(value) is PerElement else type(value).__name__
        raise LayoutError(
            f"{path_str(path)}: got a {kind} that JSON would not give back. "
            "Use None, bool, int, float, str, or lists and str-keyed dicts of them."
        )


def _survives_json(value: Any) -> bool:
    """Whether value and type come back. Subclasses (enums, numpy's float64) do not."""
    if type(value) is PerElement:
        return all(map(_survives_json, value.array.flat))
    if type(value) is dict:
        return all(type(key) is str and _survives_json(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_survives_json, value))
    return value is None or type(value) in (bool, int, float, str)
