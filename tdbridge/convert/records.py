"""Dataclasses that JAX takes for leaves: nodes of those of their fields that hold what crosses."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from inspect import getmembers_static
from typing import Any

import jax
import numpy as np
import torch
from jax.tree_util import GetAttrKey
from tensordict import is_tensor_collection

from tdbridge.layout.tree import is_node


def is_record(kind: type) -> bool:
    """Whether `kind`, of a leaf, is a dataclass, and no container of its fields besides."""
    other = is_tensor_collection(kind) or issubclass(kind, _NO_RECORDS)
    return is_dataclass(kind) and not other


_NO_RECORDS = (torch.Tensor, torch.nn.Module, dict, list)


def opened(tree: Any, inside: tuple[Any, ...] = ()) -> Any:
    """`tree`, where dataclasses that JAX takes for leaves are nodes, if they hold what crosses."""

    def open_one(leaf: Any) -> Any:
        if not is_record(type(leaf)) or any(leaf is outer for outer in inside):
            return leaf
        found = {name: opened(v, (*inside, leaf)) for name, v in fields_of(leaf).items()}
        held = {name: value for name, value in found.items() if _holds_arrays(value)}
        return _Record(leaf, held) if held else leaf

    return jax.tree_util.tree_map(open_one, tree, is_leaf=is_node)


def _holds_arrays(tree: Any) -> bool:
    return any(
        isinstance(leaf, (torch.Tensor, np.ndarray, jax.Array)) or is_node(leaf)
        for leaf in jax.tree_util.tree_leaves(tree, is_leaf=is_node)
    )


@jax.tree_util.register_pytree_with_keys_class
class _Record:
    """A dataclass as a node of those of its fields that hold what crosses."""

    def __init__(self, source: Any, held: dict[str, Any]) -> None:
        self.source, self.held = source, held

    def tree_flatten_with_keys(self) -> tuple[Any, "_Record"]:
        return [(GetAttrKey(name), value) for name, value in self.held.items()], self

    @classmethod
    def tree_unflatten(cls, record: "_Record", values: Sequence[Any]) -> Any:
        """The dataclass with other values in these fields."""
        return with_fields(record.source, dict(zip(record.held, values, strict=True)))


def fields_of(record: Any) -> dict[str, Any]:
    """The values of the fields of a dataclass, those that are set."""
    return {f.name: getattr(record, f.name) for f in fields(record) if hasattr(record, f.name)}


def with_fields(record: Any, values: Mapping[str, Any]) -> Any:
    """A shallow copy of a dataclass with other values in these fields: no construction."""
    new = copy.copy(record)
    for name, value in values.items():
        object.__setattr__(new, name, value)  # it may be frozen
    for name, member in getmembers_static(type(new)):
        if isinstance(member, cached_property):  # computed from the old values
            vars(new).pop(name, None)
    return new
