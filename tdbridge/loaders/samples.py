"""Samples -> one node: the description of their batch, whose leaves are columns."""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any

import jax
import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection

from tdbridge._compat import tensordict as compat
from tdbridge.convert.records import fields_of
from tdbridge.errors import LayoutError, LeafTypeError
from tdbridge.layout.constants import Constant
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.non_tensors import PerElement, elements_of, value_of
from tdbridge.layout.spec import Path, path_str
from tdbridge.layout.tree import BUILDERS, Node, is_node, names_of, node_of
from tdbridge.loaders.columns import NUMBERS, column_of, described, difference


class NoColumns(Exception):  # noqa: N818 - says which way to go, and reaches no user
    """The samples cannot be stacked leaf by leaf: lazy stacks, jagged or unbatched tensors."""


def batched(samples: Sequence[Any], path: Path = ()) -> Node:
    """Describes the batch of samples; each of its leaves is a `Column`.

    Args:
        samples: TensorDicts, tensorclasses or nested mappings, at least one.
        path: where they are in whole samples.

    Raises:
        NoColumns: a kind that stock has to stack.
        LayoutError: the samples differ, in keys, batch sizes, names, dtypes or shapes.
        LeafTypeError: a value that no batch can hold, a jax array for one.
    """
    node = _described(samples[0], path)
    if node.cls in BUILDERS or node.unbatched:
        raise NoColumns
    _check_kinds(samples, path)
    columns = _columns(samples, path)
    count = len(samples)
    return replace(
        node,
        batch_size=(count, *node.batch_size),
        names=None if node.names is None else (None, *node.names),
        leaves=[column_of((*path, key), columns[key]) for key in node.keys],
        nested=tuple([(key, batched(columns[key], (*path, key))) for key, _ in node.nested]),
        constants=tuple(
            [(key, _joined(node, (*path, key), columns[key])) for key, _ in node.constants]
        ),
    )


def _described(sample: Any, path: Path) -> Node:
    if not is_node(sample):
        return _mapping_node(sample, path)
    node = node_of(sample)
    if any(isinstance(leaf, torch.Tensor) and not leaf.is_cpu for leaf in node.leaves):
        raise NoColumns
    if node.source is not sample and node.cls is not type(sample):  # read from a file
        raise NoColumns
    for key, leaf in zip(node.keys, node.leaves, strict=True):
        _check_no_jax((*path, key), leaf)
    return node


def _mapping_node(sample: Mapping[str, Any], path: Path) -> Node:
    keys, nested, constants = [], [], []
    for key, value in sample.items():
        if not isinstance(key, str):
            raise LeafTypeError(
                f"{path_str((*path, str(key)))}: got a key of type {type(key).__name__}; a "
                "TensorDict has strings for keys."
            )
        if _is_leaf((*path, key), value):
            keys.append(key)
        elif isinstance(value, Mapping) or is_node(value):
            nested.append((key, value))
        else:
            _check_no_tensors((*path, key), value)
            constants.append((key, Constant(value)))
    constants.sort(key=lambda item: item[0])
    return Node(
        source=sample,
        cls=TensorDict,
        batch_size=(),
        names=None,
        constants=tuple(constants),
        keys=tuple(keys),
        leaves=[sample[key] for key in keys],
        nested=tuple(nested),
    )


def _is_leaf(path: Path, value: Any) -> bool:
    _check_no_jax(path, value)
    if isinstance(value, torch.Tensor):
        if not value.is_cpu or (is_node(value)):
            raise NoColumns
        return True
    if isinstance(value, (np.ndarray, np.generic)):
        return _is_numeric(value.dtype)
    return type(value) in NUMBERS


def _is_numeric(dtype: np.dtype) -> bool:
    try:
        dtype_of(dtype)
    except LeafTypeError:  # text, dates, objects: as non-tensor data
        return False
    return True


def _check_no_jax(path: Path, value: Any) -> None:
    if isinstance(value, jax.Array):
        raise LeafTypeError(
            f"{path_str(path)}: got a jax array in a sample. Make torch or numpy data in the "
            "dataset, and convert the batch: tdbridge.to_jax(batch)."
        )


def _check_no_tensors(path: Path, value: Any) -> None:
    """What stays as it is in a batch must hold nothing that is to be stacked."""
    if is_dataclass(value) and not isinstance(value, type):
        value = fields_of(value)
    for part in value.values() if isinstance(value, dict) else _items(value):
        if isinstance(part, (torch.Tensor, np.ndarray, jax.Array)) or is_node(part):
            raise LeafTypeError(
                f"{path_str(path)}: got a {type(value).__name__} that holds {described(part)}. "
                "Stack its parts, or name them: a nested dict."
            )
        _check_no_tensors(path, part)


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _check_kinds(samples: Sequence[Any], path: Path) -> None:
    """All mappings; or of one class, batch size and names."""
    kinds = {*map(type, samples)}
    if not is_node(first := samples[0]):
        if not all(issubclass(kind, Mapping) and not is_tensor_collection(kind) for kind in kinds):
            raise difference(path, samples)
        return
    if len(kinds) > 1 or len({*map(_batch_size, samples)}) > 1:
        raise difference(path, samples)
    if compat.all_unnamed(samples):
        return
    names = names_of(first)
    for i, sample in enumerate(samples):
        if names_of(sample) != names:
            raise LayoutError(
                f"{_at(path)}sample {i} has names {sample.names}, sample 0 has {first.names}."
            )


_batch_size = attrgetter("batch_size")


def _columns(samples: Sequence[Any], path: Path) -> dict[str, list[Any]]:
    """The entries of all samples by key."""
    entries = compat.entries_of(samples) if is_node(samples[0]) else samples
    keys = entries[0].keys()
    for i, entry in enumerate(entries):
        if entry.keys() != keys:
            raise LayoutError(
                f"{_at(path)}sample {i} has keys {_sorted(entry)}, sample 0 has {_sorted(keys)}: "
                f"missing {_sorted(keys - entry.keys())}, extra {_sorted(entry.keys() - keys)}."
            )
    return {key: list(map(itemgetter(key), entries)) for key in keys}


def _at(path: Path) -> str:
    return f"{path_str(path)}: " if path else ""


def _sorted(keys: Any) -> list[str]:
    return sorted(map(str, keys))


_FIXED = {type(None), bool, int, str, bytes}


def _joined(node: Node, path: Path, entries: Sequence[Any]) -> Constant:
    """The one value of all samples, or one for each."""
    values = list(map(value_of, entries))
    first = values[0]
    each = isinstance(first, PerElement)
    if not each and all(value is first for value in values):
        return Constant(first)
    for value in values:
        _check_no_jax(path, value)
        _check_no_tensor(path, value, first)
    if not each and _all_equal(values):
        return Constant(first)
    parts = [elements_of(value, node.batch_size) for value in values]
    return Constant(PerElement(np.stack(parts)))


def _check_no_tensor(path: Path, value: Any, first: Any) -> None:
    if isinstance(value, torch.Tensor) and not isinstance(first, torch.Tensor):
        raise difference(path, [first, value])


def _all_equal(values: Sequence[Any]) -> bool:
    first = values[0]
    if type(first) in _FIXED:
        return all(type(value) is type(first) and value == first for value in values)
    constant = Constant(first)
    return all(value is first or Constant(value) == constant for value in values)
