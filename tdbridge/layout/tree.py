"""One view of every kind of tree: a node is a class, a batch size, names, constants, children."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from itertools import islice
from typing import Any

import numpy as np
import torch
from tensordict import (
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    is_non_tensor,
    is_tensor_collection,
)

from tdbridge._compat import tensordict as compat
from tdbridge.errors import LeafTypeError
from tdbridge.layout.classes import is_supported
from tdbridge.layout.constants import Constant
from tdbridge.layout.non_tensors import entry_of, value_of
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
        keys: the keys of its leaves, in its own order.
        leaves: its leaves, in the order of `keys`.
        nested: the trees in it by key, in its own order (as `Node`s once `tree_of` has described
            them too).
        unbatched: the keys of the leaves whose shape does not start with the batch size.
        device: what it declares, where `source` is no TensorDict that could be asked.
    """

    source: Any
    cls: type
    batch_size: tuple[int, ...]
    names: tuple[str | None, ...] | None
    constants: tuple[tuple[str, Constant], ...]
    keys: tuple[str, ...]
    leaves: list[Any]
    nested: tuple[tuple[str, Any], ...]
    unbatched: frozenset[str] = frozenset()
    device: torch.device | None = None


class _EntryError(LeafTypeError):
    """Of one entry of a node; `tree_of` puts the path of the node before its key."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{path_str((key,))}: {message}")
        self.key, self.message = key, message


@singledispatch
def node_of(tree: Any) -> Node:
    """Describes one level of `tree`; the trees nested in it are left as they are.

    Raises:
        LeafTypeError: `tree` is of a kind that is not carried.
    """
    if is_non_tensor(tree):
        raise LeafTypeError(f"got a bare {type(tree).__name__}, which holds no tensors.")
    if is_supported(type(tree)):
        return _tensordict_node(tree)
    if is_tensor_collection(tree):
        advice = "call `.contiguous()` or `.to_tensordict()` first"
    else:
        advice = "expected a TensorDict, a tensorclass or an ArrayDict"
    raise LeafTypeError(f"got a {type(tree).__name__}, which is not carried as a tree: {advice}.")


def is_node(value: Any) -> bool:
    """Whether `value` is a tree of ours rather than a leaf."""
    if is_tensor_collection(type(value)):  # not of a class itself, which is a leaf
        return not is_non_tensor(value)
    return node_of.dispatch(type(value)) is not _NO_NODE


_NO_NODE = node_of.dispatch(object)
_ONLY_TENSORS = {torch.Tensor}

BUILDERS: dict[type, Callable[[dict[str, Any]], Any]] = {}
"""How a node is built whose class is no TensorDict with keys of its own, from its entries.

See `kinds`; such a node stands apart from the batch of the tree that it is in.
"""


@node_of.register(TensorDict)
def _tensordict_node(td: Any) -> Node:
    inner = compat.tensordict_of(td)
    if inner is not td and type(inner) in BUILDERS:
        return _wrapped_node(node_of(inner), td)
    entries = dict(inner.items())
    nested, constants, unbatched = [], [], []
    if set(map(type, entries.values())) != _ONLY_TENSORS:  # most nodes hold nothing else
        for key, value in list(entries.items()):
            if isinstance(value, UnbatchedTensor):
                entries[key] = payload(value)
                unbatched.append(key)
            elif not is_non_tensor(value):
                if is_node(value):
                    nested.append((key, entries.pop(key)))
            elif is_array(data := _value(key, value)):
                # tensordict takes a jax array, or a bfloat16 numpy one, for a non-tensor.
                _check_shape(key, data, td.batch_size)
                entries[key] = data
            else:
                constants.append((key, Constant(data)))
                del entries[key]
        constants.sort(key=lambda item: item[0])
        unbatched += _stand_for_unbatched(inner, entries)
    return Node(
        source=td,
        cls=type(td),
        batch_size=tuple(td.batch_size),
        names=names_of(td),
        constants=tuple(constants),
        keys=tuple(entries),
        leaves=list(entries.values()),
        nested=tuple(nested),
        unbatched=frozenset(unbatched),
    )


def _stand_for_unbatched(inner: Any, entries: dict[str, Any]) -> list[str]:
    """The keys of the leaves that a pytree registry put in the place of unbatched tensors.

    `pytrees.register` leaves a tree of other leaves with what it was made from.
    """
    definition, _, was, *_ = getattr(inner, "_made_from", None) or (None, None, {})
    keys = definition.unbatched if definition is not None else ()
    return [key for key in keys if key in entries and entries[key] is was.get(key)]


def _value(key: str, entry: Any) -> Any:
    try:
        return value_of(entry)
    except LeafTypeError as error:
        raise _EntryError(key, str(error)) from None


def _wrapped_node(inner: Node, td: Any) -> Node:
    """Of a tensorclass over a lazy stack: the stack of that class."""
    members = tuple([(key, compat.wrap(type(td), member)) for key, member in inner.nested])
    return replace(
        inner, source=td, nested=members, constants=(*inner.constants, ("wrapped", Constant(True)))
    )


def payload(tensor: UnbatchedTensor) -> torch.Tensor:
    """The plain tensor that an `UnbatchedTensor` holds."""
    return tensor.__reduce_ex__(4)[1][0]  # what a pickle of it is made of


def _check_shape(key: str, array: Any, batch_size: Sequence[int]) -> None:
    if tuple(array.shape[: len(batch_size)]) != tuple(batch_size):
        raise _EntryError(
            key,
            f"got an array of shape {tuple(array.shape)} stored as non-tensor data; as a leaf it "
            f"has to start with the batch size {list(batch_size)}.",
        )


def is_array(value: Any) -> bool:
    """Whether `value` is an array of JAX or of ml_dtypes, which torch cannot take as it is."""
    if isinstance(value, np.ndarray):
        dtype = value.dtype
        return dtype.kind == "V" and dtype.names is None and dtype.type is not np.void
    return hasattr(value, "dtype") and hasattr(value, "sharding")


def names_of(td: TensorDictBase) -> tuple[str | None, ...] | None:
    """The names of the batch dimensions, or None when none has one."""
    try:
        names = tuple(td.names or ())
    except ValueError:  # a lazy stack, whose members disagree
        return None
    return names if any(name is not None for name in names) else None


def tree_of(tree: Any, path: Path = ()) -> Node:
    """Describes `tree` at every level.

    Raises:
        LeafTypeError: a node is of a kind that is not carried; the error names its path.
    """
    try:
        node = node_of(tree)
    except _EntryError as error:
        raise LeafTypeError(f"{path_str((*path, error.key))}: {error.message}") from None
    except LeafTypeError as error:
        raise LeafTypeError(f"{path_str(path)}: {error}") if path else error from None
    if node.nested:
        node.nested = tuple([(key, tree_of(value, (*path, key))) for key, value in node.nested])
    return node


# The leaves of a tree stand in one order everywhere: a node's own, then those of its nested trees.


def leaves_of(node: Node) -> list[Any]:
    """All leaves of the tree."""
    if not node.nested:
        return node.leaves
    return [*node.leaves, *(leaf for _, child in node.nested for leaf in leaves_of(child))]


def paths_of(node: Node, path: Path = ()) -> list[Path]:
    """The paths of all leaves of the tree, in the order of `leaves_of`."""
    own = [(*path, key) for key in node.keys]
    return own + [p for key, child in node.nested for p in paths_of(child, (*path, key))]


def walk_nodes(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Each node with its path, parents first."""
    yield path, node
    for key, child in node.nested:
        yield from walk_nodes(child, (*path, key))


def rebuild(
    node: Node, leaves: Iterator[Any], device: torch.device | None = None, path: Path = ()
) -> Any:
    """The same tree, as TensorDicts, over other leaves.

    Args:
        node: a tree that `tree_of` described.
        leaves: one per leaf of `node`, in the order of `leaves_of`.
        device: the device of the new leaves, for each node that had a device; the old one when
            it is not given.
        path: where the node is.

    Raises:
        LeafTypeError: the leaves do not fit together any more; the error names the place.
    """
    entries = dict(zip(node.keys, islice(leaves, len(node.keys)), strict=True))
    old_device = device_of(node)
    own_device = old_device and (device or old_device)
    if node.nested or node.constants or node.unbatched:
        for key, child in node.nested:
            entries[key] = rebuild(child, leaves, device, (*path, key))
        if node.cls in BUILDERS:
            values = {key: constant.value for key, constant in node.constants}
            return _built(node.cls, entries | values, path)
        for key, constant in node.constants:
            entries[key] = entry_of(constant.value, node.batch_size, own_device)
        for key in node.unbatched:
            if not isinstance(entries[key], torch.Tensor):
                raise LeafTypeError(
                    f"{path_str((*path, key))}: got a {type(entries[key]).__name__} in the place "
                    "of an unbatched tensor: keep it outside of the batch."
                )
            entries[key] = UnbatchedTensor(entries[key], batch_size=node.batch_size)
        entries = {key: entries[key] for key in list(node.source.keys())}
    return compat.new_tensordict(
        node.cls,
        entries,
        batch_size=node.batch_size,
        names=node.names,
        device=own_device,
    )


def device_of(node: Node) -> torch.device | None:
    """The device that a node declares; most declare none."""
    # Asking an ArrayDict for it costs as much as ten leaves do.
    return node.source.device if is_tensor_collection(node.source) else node.device


def _built(cls: type, entries: dict[str, Any], path: Path) -> Any:
    try:
        return BUILDERS[cls](entries)
    except Exception as error:  # whatever torch has to say of parts that do not fit together
        where = f"{path_str(path)}: " if path else ""
        raise LeafTypeError(
            f"{where}got parts that make no {cls.__name__} ({error}). A stack or a "
            "batch of them has to be taken apart first."
        ) from error
