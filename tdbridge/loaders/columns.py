"""One leaf of all samples: what it is of, whether all are alike, and how they are written."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor

from tdbridge._compat.torch import all_of_plain_type, why_not_dense
from tdbridge.errors import LayoutError, LeafTypeError
from tdbridge.layout.buffer import check_nodes
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.plan import plan_of
from tdbridge.layout.spec import Path, path_str
from tdbridge.layout.tree import Node, leaves_of
from tdbridge.loaders.batches import packed


class Column(NamedTuple):
    """The values of one leaf, one per sample, as a leaf of their batch.

    Attributes:
        dtype: the torch or the numpy dtype of each.
        shape: the shape of the batch: the number of samples, then the shape of each.
        write: copies the values to their place in a buffer.
    """

    dtype: Any
    shape: tuple[int, ...]
    write: Callable[[Tensor], Any]


NUMBERS = (bool, int, float, complex)


def column_of(path: Path, values: Sequence[Any]) -> Column:
    """The column of one leaf.

    Args:
        path: where the leaf is in each sample.
        values: tensors, numpy arrays and scalars, or Python numbers; one per sample.

    Raises:
        LayoutError: the values differ in kind or dtype; the shapes are compared by `write`.
        LeafTypeError: they are of a kind that cannot be stacked.
    """
    first = values[0]
    if isinstance(first, Tensor):
        return _tensors(path, values)
    if isinstance(first, (np.ndarray, np.generic)):
        return _arrays(path, values)
    return _numbers(path, values)


_dtype = attrgetter("dtype")


def _tensors(path: Path, values: Sequence[Any]) -> Column:
    if not all_of_plain_type(values):
        values = [_stripped(path, i, value, values[0]) for i, value in enumerate(values)]
    if len({*map(_dtype, values)}) > 1:  # `torch.stack` would promote them
        raise difference(path, values)

    def write(place: Tensor) -> None:
        try:
            with torch.no_grad():
                torch.stack(list(values), out=place)
        except (RuntimeError, NotImplementedError):
            for i, value in enumerate(values):
                _check_dense(path, i, value)
            raise difference(path, values) from None

    return Column(values[0].dtype, (len(values), *values[0].shape), write)


def _stripped(path: Path, index: int, value: Any, first: Tensor) -> Tensor:
    """Without its class: a memory-mapped tensor and a Parameter are plain tensors besides."""
    if not isinstance(value, Tensor):
        raise difference(path, [first, value], [0, index])
    _check_dense(path, index, value)
    return value.detach().as_subclass(Tensor)


def _check_dense(path: Path, index: int, tensor: Tensor) -> None:
    if (reason := why_not_dense(tensor)) is not None:
        raise LeafTypeError(f"{path_str(path)}: sample {index} has {reason}.")


def _arrays(path: Path, values: Sequence[Any]) -> Column:
    if not {*map(type, values)} <= _PLAIN_ARRAYS:
        for i, value in enumerate(values):
            _check_array(path, i, value, values[0])
    if len({*map(_dtype, values)}) > 1:
        raise difference(path, values)

    def write(place: Tensor) -> None:
        # By its bytes: torch gives no numpy view of a bfloat16 tensor.
        view = place.view(torch.uint8).numpy().view(dtype_of(values[0].dtype).in_numpy)
        try:
            np.stack(values, out=view, casting="equiv")  # byte orders may differ
        except ValueError:
            raise difference(path, values) from None

    return Column(values[0].dtype, (len(values), *values[0].shape), write)


_PLAIN_ARRAYS = {np.ndarray, np.memmap}


def _check_array(path: Path, index: int, value: Any, first: Any) -> None:
    if not isinstance(value, (np.ndarray, np.generic)):
        raise difference(path, [first, value], [0, index])
    if type(value) not in _PLAIN_ARRAYS and isinstance(value, np.ndarray):
        raise LeafTypeError(
            f"{path_str(path)}: sample {index} has a {type(value).__name__}, which may hold more "
            "than its numbers: make it a plain numpy array."
        )


def _numbers(path: Path, values: Sequence[Any]) -> Column:
    if len({*map(type, values)}) > 1:
        raise difference(path, values)
    try:
        tensor = torch.tensor(values, dtype=_number_dtype(type(values[0])), device="cpu")
    except (OverflowError, RuntimeError, ValueError) as error:
        raise LayoutError(f"{path_str(path)}: got integers that exceed int64: {error}.") from None
    return Column(tensor.dtype, tuple(tensor.shape), lambda place: place.copy_(tensor))


def _number_dtype(kind: type) -> torch.dtype:
    if kind in (bool, int):
        return torch.bool if kind is bool else torch.int64
    real = torch.get_default_dtype()
    return real if kind is float else real.to_complex()


def packed_columns(node: Node) -> Any:
    """The consolidated tree of a node whose leaves are columns."""
    check_nodes(node)
    plan = plan_of(node)

    def write(_: Tensor, views: list[Tensor]) -> None:
        for column, view in zip(plan.placed(leaves_of(node)), views, strict=True):
            column.write(view)

    return packed(node, plan, write)


def difference(
    path: Path, values: Sequence[Any], numbers: Sequence[int] | None = None
) -> LayoutError:
    """Says which sample is the first that differs from sample 0, and what it has.

    Args:
        path: where the values are in each sample.
        values: one per sample, not all alike.
        numbers: the numbers of these samples, when they are not all.
    """
    whats = list(map(described, values))
    other = next((i for i, what in enumerate(whats) if what != whats[0]), len(whats) - 1)
    index = other if numbers is None else numbers[other]
    where = f"{path_str(path)}: " if path else ""
    return LayoutError(
        f"{where}sample {index} has {whats[other]}, sample 0 has {whats[0]}. {_advice(values)}"
    )


def _advice(values: Sequence[Any]) -> str:
    tensors = all(isinstance(value, Tensor) for value in values) or all(
        isinstance(value, (np.ndarray, np.generic)) for value in values
    )
    if not tensors or len({*map(_dtype, values)}) > 1:
        return "Make them alike in the dataset: nothing is cast here."
    return "Pad them to one shape, or make each sample's a jagged tensor."


def described(value: Any) -> str:
    """A value of a sample in a few words: its kind, dtype and shape."""
    if isinstance(value, jax.Array):
        return "a jax array: make torch or numpy data in the dataset"
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"a numpy array of {value.dtype}{list(value.shape)}"
    if is_tensor_collection(value):
        return f"a {type(value).__name__} of batch size {list(value.batch_size)}"
    size = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}{size}"
