"""`tdbridge.json`: the nodes of a tree that neither engine can describe.

DCP and Orbax store nested dicts of leaves. That a node was a TensorDict with a batch size, a tuple
or an empty dict stands in this small file beside theirs. Both engines ignore it. It is data,
checked when it is read, and nothing in it is ever imported or run.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any

from tdbridge.errors import CheckpointError

FILE = "tdbridge.json"
_VERSION = 1

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Node:
    """One container of the tree.

    Attributes:
        kind: `"tensordict"`, `"tuple"`, or `"dict"` and `"list"` for empty ones.
        batch_size: of a tensordict.
        names: of the batch dimensions, or None when there are none.
        class_name: the class of a tensordict, as information: loading never imports it.
    """

    kind: str
    batch_size: tuple[int, ...] = ()
    names: tuple[str | None, ...] | None = None
    class_name: str | None = None


# The type that a node of each kind has when an engine has read it.
KINDS = {"tensordict": dict, "dict": dict, "tuple": (list, tuple), "list": list}


def write_nodes(directory: FilePath, nodes: Mapping[Path, Node]) -> None:
    """Writes the sidecar, if there is anything to say."""
    if nodes:
        entries = [{"path": list(path), **_to_json(node)} for path, node in nodes.items()]
        text = json.dumps({"version": _VERSION, "nodes": entries})
        (directory / FILE).write_text(text, encoding="utf-8")


def _to_json(node: Node) -> dict[str, Any]:
    return asdict(node) if node.kind == "tensordict" else {"kind": node.kind}


def read_nodes(directory: FilePath) -> dict[Path, Node]:
    """Reads the sidecar of a checkpoint; a checkpoint without one has no nodes to describe.

    Raises:
        CheckpointError: the file cannot be read, is not what `write_nodes` writes, or is of a later
            version.
    """
    file = directory / FILE
    if not file.exists():
        return {}
    data = read_json(file)
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise CheckpointError(
            f"{file}: expected version {_VERSION}. It is damaged or of a later tdbridge: load it "
            "with that, or delete the file to load without batch sizes."
        )
    entries = data.get("nodes")
    if not isinstance(entries, list):
        raise CheckpointError(f"{file}: expected a list of nodes, got {type(entries).__name__}.")
    return dict(_from_json(entry, file) for entry in entries)


def read_json(file: FilePath) -> Any:
    """Parses a JSON file.

    Raises:
        CheckpointError: it cannot be read or is no JSON; the message names it.
    """
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error


def _from_json(entry: Any, file: FilePath) -> tuple[Path, Node]:
    if not (isinstance(entry, dict) and _is_valid(entry)):
        raise CheckpointError(f"{file}: got the malformed node {str(entry)[:200]}.")
    size, names = tuple(entry.get("batch_size", ())), entry.get("names")
    node = Node(entry["kind"], size, names and tuple(names), entry.get("class_name"))
    return tuple(entry["path"]), node


def _is_valid(entry: dict[str, Any]) -> bool:
    size, names = entry.get("batch_size", []), entry.get("names")
    return (
        _is_list(entry.get("path"), (str, int))
        and isinstance(entry.get("kind"), str)
        and entry["kind"] in KINDS
        and _is_list(size, (int,))
        and all(0 <= dim < 2**63 for dim in size)
        and (names is None or (_is_list(names, (str, type(None))) and len(names) == len(size)))
        and isinstance(entry.get("class_name"), str | None)
    )


def _is_list(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, list) and all(type(item) in types for item in value)
