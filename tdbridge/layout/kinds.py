"""Trees that are no dict of tensors of one batch: lazy stacks, jagged tensors, stored files.

A lazy stack is a node of its members, `"0"`, `"1"`, ..., and a jagged tensor one of its values,
offsets and lengths. What is needed to make them again are constants of the node.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, PersistentTensorDict, lazy_stack
from torch.utils.weak import WeakIdKeyDictionary

from tdbridge.errors import LeafTypeError
from tdbridge.layout.classes import Jagged
from tdbridge.layout.constants import Constant
from tdbridge.layout.tree import BUILDERS, Node, names_of, node_of


@node_of.register(LazyStackedTensorDict)
def _lazy_node(stack: Any) -> Node:
    if type(stack) is not LazyStackedTensorDict:
        raise LeafTypeError(
            f"got a {type(stack).__name__}, a stack of another kind: call `.contiguous()` first."
        )
    members = stack.tensordicts
    constants = [("stack_dim", Constant(stack.stack_dim))]
    names = names_of(stack)
    if names is not None and (name := names[stack.stack_dim]) is not None:
        constants.append(("stack_dim_name", Constant(name)))
    return _node(
        stack,
        LazyStackedTensorDict,
        constants,
        batch_size=common_prefix([member.batch_size for member in members]),
        nested=tuple([(str(i), member) for i, member in enumerate(members)]),
    )


def common_prefix(sizes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The leading dimensions that all of `sizes` share."""
    columns = zip(*sizes, strict=False)
    return tuple([dims[0] for dims in takewhile(lambda dims: len(set(dims)) == 1, columns)])


def _build_lazy(entries: dict[str, Any]) -> Any:
    dim, name = entries.pop("stack_dim"), entries.pop("stack_dim_name", None)
    wrapped = entries.pop("wrapped", False)
    members = [entries[key] for key in sorted(entries, key=int)]
    stack = lazy_stack(members, dim) if wrapped else LazyStackedTensorDict(*members, stack_dim=dim)
    if name is not None:
        stack.names = [*stack.names[:dim], name, *stack.names[dim + 1 :]]
    return stack


@node_of.register(Jagged)
def _jagged_node(tensor: Any) -> Node:
    offsets = tensor.offsets()
    parts = {"values": tensor.values(), "offsets": offsets, "lengths": tensor.lengths()}
    parts = {key: part for key, part in parts.items() if part is not None}
    # The size of the ragged dimension is a symbol.
    ragged = [isinstance(size, int) for size in tensor.shape].index(False)
    constants = [
        ("jagged_dim", Constant(ragged)),
        ("offsets_dtype", Constant(offsets.dtype)),
    ]
    return _node(tensor, Jagged, constants, keys=tuple(parts), leaves=list(parts.values()))


def _build_jagged(entries: dict[str, Any]) -> Any:
    dtype = entries["offsets_dtype"]
    lengths = entries.get("lengths")
    return torch.nested.nested_tensor_from_jagged(
        entries["values"],
        _as_dtype(entries["offsets"], dtype),
        None if lengths is None else _as_dtype(lengths, dtype),
        jagged_dim=entries["jagged_dim"],
    )


_widened: Any = WeakIdKeyDictionary()


def _as_dtype(offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`offsets` as they were before JAX narrowed them: one tensor for all that share them.

    torch takes two jagged tensors for equally long only when their offsets are one object.
    """
    if offsets.dtype == dtype:
        return offsets
    if offsets not in _widened:
        _widened[offsets] = offsets.to(dtype)
    return _widened[offsets]


@node_of.register(PersistentTensorDict)
def _persistent_node(td: Any) -> Node:
    """What the file holds, read into memory: it comes back as a TensorDict."""
    return node_of(td.to_tensordict())


_NEEDED = {
    LazyStackedTensorDict: {"stack_dim"},
    Jagged: {"values", "offsets", "jagged_dim", "offsets_dtype"},
}


def check_whole(cls: type, children: Sequence[str], constants: Iterable[str]) -> None:
    """Checks that nothing is missing, or too much, that a stack or a jagged tensor is made of.

    Raises:
        LeafTypeError: entries were taken out of the tree, or put in.
    """
    if cls not in _NEEDED:
        return
    missing = sorted(_NEEDED[cls] - {*children, *constants})
    strange = [key for key in children if cls is LazyStackedTensorDict and not key.isdecimal()]
    faults = [f"without {missing}"] if missing else []
    faults += [f"with {strange}"] if strange else []
    if faults:
        raise LeafTypeError(
            f"got a {cls.__name__} {' and '.join(faults)}, of which none can be made: change its "
            "parts, and keep its own entries."
        )


def _node(source: Any, cls: type, constants: list[tuple[str, Constant]], **parts: Any) -> Node:
    empty = {"batch_size": (), "keys": (), "leaves": [], "nested": ()}
    constants.sort(key=lambda item: item[0])
    return Node(source=source, cls=cls, names=None, constants=tuple(constants), **(empty | parts))


BUILDERS.update({LazyStackedTensorDict: _build_lazy, Jagged: _build_jagged})
