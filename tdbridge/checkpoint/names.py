"""Trees and flat names: `{"params": {"w": x}}`, `{("params", "w"): x}` and `"params.w"`.

Both engines join the keys of a path with dots, so two paths can end up with one name. Orbax then
loses one of the two leaves silently; here that is an error before any file is written.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    UnbatchedTensor,
    is_non_tensor,
    is_tensor_collection,
)

from tdbridge.checkpoint.leaves import is_array, is_scalar
from tdbridge.checkpoint.sidecar import Node, Path
from tdbridge.errors import CheckpointError
from tdbridge.layout.classes import class_name, stands_apart
from tdbridge.pytrees.arraydict import ArrayDict
from tdbridge.pytrees.packed import PackedArrayDict


def show(path: Path) -> str:
    """How a message names a leaf: `['params'][0]`, or `the root`."""
    return "".join(f"[{key!r}]" for key in path) or "the root"


def flatten(tree: Any) -> tuple[dict[Path, Any], dict[Path, Node]]:
    """Takes a tree apart into its leaves and the nodes that no engine can describe.

    An empty container counts as a leaf too. Leaves are not copied.

    Raises:
        CheckpointError: a node that cannot be written, named with its path.
    """
    leaves: dict[Path, Any] = {}
    nodes: dict[Path, Node] = {}
    _visit(tree, (), leaves, nodes)
    return leaves, nodes


def _visit(value: Any, path: Path, leaves: dict[Path, Any], nodes: dict[Path, Node]) -> None:
    if is_non_tensor(value):
        value = _non_tensor(value, path)
    if isinstance(value, PackedArrayDict):
        value = value.unpack()
    children = _children(value, path)
    if children is None:
        leaves[path] = value
        return
    node = _describe(value, children)
    if node is not None:
        nodes[path] = node
    if not children:
        leaves[path] = [] if isinstance(value, list | tuple) else {}
    for key, child in children:
        _visit(child, (*path, key), leaves, nodes)


def _non_tensor(value: Any, path: Path) -> Any:
    """The value of a non-tensor entry, if both engines can hold it."""
    data = value.data if isinstance(value, NonTensorData) else value
    if is_scalar(data):
        return data
    raise CheckpointError(
        f"{show(path)}: got a non-tensor entry of type {type(data).__name__}; only bool, int, "
        "float, str and None can be held. Store it as tensors, or under one key each."
    )


def _children(value: Any, path: Path) -> list[tuple[Any, Any]] | None:
    """The (key, child) pairs of a container, or None for a leaf."""
    if isinstance(value, Mapping) or is_tensor_collection(value):
        return _items(value, path)
    if hasattr(value, "_fields") and isinstance(value, tuple):
        raise CheckpointError(
            f"{show(path)}: got the named tuple {type(value).__name__}, whose class a checkpoint "
            "cannot hold. Pass its `_asdict()`."
        )
    return list(enumerate(value)) if isinstance(value, list | tuple) else None


def _items(value: Any, path: Path) -> list[tuple[str, Any]]:
    if isinstance(value, LazyStackedTensorDict):
        value = _dense(value, path)
    items = list(value.items())
    _refuse_kinds(value, items, path)
    if isinstance(value, ArrayDict):
        items = [(key, _array_entry(child, (*path, key))) for key, child in items]
    for key, _ in items:
        if type(key) is not str:
            raise CheckpointError(
                f"{show(path)}: got the key {key!r} of type {type(key).__name__}, which would come "
                "back as a string. Use string keys."
            )
    return items


def _refuse_kinds(value: Any, items: list[tuple[Any, Any]], path: Path) -> None:
    """Refuses what would come back as a TensorDict of another batch size, or not at all."""
    if isinstance(value, ArrayDict) and stands_apart(value.tensorclass):
        raise CheckpointError(
            f"{show(path)}: got a {value.tensorclass.__name__}, whose class a checkpoint cannot "
            "hold. Save its parts under one key each."
        )
    apart = value._definition.unbatched if isinstance(value, ArrayDict) else ()
    for key, child in items:
        if isinstance(child, UnbatchedTensor) or (key in apart and is_array(child)):
            raise CheckpointError(
                f"{show((*path, key))}: got a leaf that is not batched, which a checkpoint cannot "
                "hold in a tree of a batch size. Save it beside the tree."
            )


def _array_entry(child: Any, path: Path) -> Any:
    # A list in an ArrayDict is one non-tensor value, not a container.
    return child if isinstance(child, ArrayDict) or is_array(child) else _non_tensor(child, path)


def _dense(stack: LazyStackedTensorDict, path: Path) -> Any:
    # `items()` of a lazy stack leaves out, without a word, what only some of its parts hold.
    keys = {frozenset(part.keys(include_nested=True)) for part in stack.tensordicts}
    try:
        if len(keys) == 1:
            return stack.contiguous()
        reason = "their keys differ"
    except RuntimeError as error:
        reason = str(error)
    raise CheckpointError(
        f"{show(path)}: got a lazy stack of unequal tensordicts ({reason}). Pad them, or save them "
        "under one key each."
    )


def _describe(value: Any, children: list[tuple[Any, Any]]) -> Node | None:
    """What has to stand in the sidecar about a container."""
    if isinstance(value, ArrayDict) or is_tensor_collection(value):
        names = tuple(value.names or ())
        return Node(
            "tensordict",
            batch_size=tuple(value.batch_size),
            names=names if any(names) else None,
            class_name=class_name(
                value.tensorclass if isinstance(value, ArrayDict) else type(value)
            ),
        )
    if isinstance(value, tuple):
        return Node("tuple")
    return None if children else Node("list" if isinstance(value, list) else "dict")


def check_names(paths: Iterable[Path]) -> None:
    """Checks that every leaf gets a name of its own.

    Raises:
        CheckpointError: two paths that have the same name, both named.

    Example:
        >>> check_names([("a.b",), ("a", "b")])
        Traceback (most recent call last):
        tdbridge.errors.CheckpointError: ['a.b'] and ['a']['b'] would both be stored as 'a.b'...
    """
    taken: dict[str, Path] = {}
    for path in paths:
        first = taken.setdefault(join(path), path)
        if first is not path:
            raise CheckpointError(
                f"{show(first)} and {show(path)} would both be stored as {join(path)!r}. "
                "Rename one of them."
            )


def join(path: Path) -> str:
    """The name of a leaf in both formats: its keys joined with dots."""
    return ".".join(map(str, path))


def nest(leaves: Mapping[Path, Any], prefix: Path = ()) -> Any:
    """Builds nested dicts and lists (where the keys are integers) from paths.

    Raises:
        CheckpointError: the paths are not those of a tree, or a list has holes.

    Example:
        >>> nest({("a", "x"): 1, ("l", 0): 2, ("l", 1): 3})
        {'a': {'x': 1}, 'l': [2, 3]}
    """
    if () in leaves:
        if len(leaves) > 1:
            raise CheckpointError(f"{show(prefix)} is both a leaf and a container.")
        return leaves[()]
    groups: dict[str | int, dict[Path, Any]] = {}
    for path, leaf in leaves.items():
        groups.setdefault(path[0], {})[path[1:]] = leaf
    children = {key: nest(group, (*prefix, key)) for key, group in groups.items()}
    return _listed(children, prefix) if any(type(key) is int for key in children) else children


def _listed(children: dict[Any, Any], prefix: Path) -> list[Any]:
    if children.keys() != set(range(len(children))):
        raise CheckpointError(
            f"{show(prefix)} is a list with holes: got the positions {list(children)[:10]!r}."
        )
    return [children[i] for i in range(len(children))]
