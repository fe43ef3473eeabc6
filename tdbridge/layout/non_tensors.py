"""Non-tensor entries of a tensordict, as values: one for the batch, or one per element."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, is_non_tensor

from tdbridge.errors import LeafTypeError


class PerElement(list[Any]):
    """Non-tensor values, one per batch element: nested lists, one level per dimension.

    Args:
        values: an object array of one value per element.

    Example:
        >>> names = PerElement(np.array(["a", "b"], object))
        >>> names, names.shape
        (['a', 'b'], (2,))
    """

    __slots__ = ("array",)

    def __init__(self, values: np.ndarray) -> None:
        super().__init__(values.tolist())
        self.array = values

    @property
    def shape(self) -> tuple[int, ...]:
        """The batch dimensions that the values stand in."""
        return self.array.shape

    def __reduce__(self) -> tuple[Any, ...]:
        return per_element, (self.shape, list(self.array.flat))


def per_element(shape: Sequence[int], values: Sequence[Any]) -> PerElement:
    """`values`, in C order, as those of the elements of a batch of that shape.

    Raises:
        ValueError: there are more or fewer than the shape says.
    """
    if math.prod(shape) != len(values):
        raise ValueError(f"got {len(values)} values for shape {tuple(shape)}.")
    array = np.empty(math.prod(shape), object)
    for i, value in enumerate(values):  # numpy would take a list for more dimensions
        array[i] = value
    return PerElement(array.reshape(shape))


def value_of(entry: Any) -> Any:
    """The value that a non-tensor entry of a tensordict holds."""
    if isinstance(entry, LazyStackedTensorDict):
        return PerElement(_elements(entry))
    while is_non_tensor(entry):
        entry = entry.data
    return entry


def _elements(entry: Any) -> np.ndarray:
    if not isinstance(entry, LazyStackedTensorDict):
        return elements_of(value_of(entry), entry.batch_size)
    members = list(map(_elements, entry.tensordicts))
    if len({member.shape for member in members}) > 1:
        raise LeafTypeError(
            f"got a NonTensorStack of batch size {list(entry.batch_size)}, whose members differ in "
            "theirs: make it a list, NonTensorData(stack.tolist())."
        )
    return np.stack(members, entry.stack_dim) if members else np.empty(0, object)


def elements_of(value: Any, batch_size: Sequence[int]) -> np.ndarray:
    """One value per element of a batch of that size: those in `value`, or `value` for each."""
    if is_per_element(value, batch_size):
        return value.array
    array = np.empty(tuple(batch_size), object)
    for place in np.ndindex(array.shape):  # `fill` would take a list for an array
        array[place] = value
    return array


def entry_of(
    value: Any, batch_size: Sequence[int], device: torch.device | None = None
) -> NonTensorData | NonTensorStack:
    """`value` as an entry of a tensordict of that batch size and device.

    Values per element are a stack as long as their shape starts with the batch size; else they
    are one value.
    """
    if is_stack(value, batch_size):
        return _stack_of(value.array, device)
    return NonTensorData(data=value, batch_size=torch.Size(batch_size), device=device)


def is_per_element(value: Any, batch_size: Sequence[int]) -> bool:
    """Whether `value` holds values per element whose shape starts with that batch size."""
    return isinstance(value, PerElement) and value.shape[: len(batch_size)] == tuple(batch_size)


def is_stack(value: Any, batch_size: Sequence[int]) -> bool:
    """Whether an entry with that value is a stack: a stack of nothing has lost its batch size."""
    return is_per_element(value, batch_size) and all(value.shape)


def _stack_of(values: np.ndarray, device: torch.device | None) -> NonTensorStack:
    if values.ndim > 1:
        return NonTensorStack(*[_stack_of(part, device) for part in values])
    return NonTensorStack(*[NonTensorData(data=value, device=device) for value in values])
