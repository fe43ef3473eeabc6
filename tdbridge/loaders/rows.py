"""A TensorDict as a dataset: its rows one by one, or a batch of them gathered at once."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from multiprocessing.context import get_spawning_popen
from operator import index as as_index
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor
from torch.utils.data import Dataset

from tdbridge.errors import LayoutError, LeafTypeError
from tdbridge.layout.buffer import check_nodes
from tdbridge.layout.non_tensors import PerElement
from tdbridge.layout.plan import Plan, constants_of, layout_of, plan_of
from tdbridge.layout.spec import path_str
from tdbridge.layout.tree import BUILDERS, Node, is_node, leaves_of, paths_of, tree_of, walk_nodes
from tdbridge.loaders.batches import consolidated, packed


class Rows(Dataset[Any]):
    """The rows of a TensorDict as a torch dataset; a batch of them is gathered into one buffer.

    A DataLoader asks for all rows of a batch at once. They are copied straight into the buffer of
    the batch, in a worker into shared memory; `collate` hands it on as it is. With batches made of
    single rows, as Grain makes them, `collate` does the copying.

    The tensors are neither copied nor changed; those that `td` is given later are not seen. A
    memory-mapped one goes to workers, spawned ones
    too, as the names of its files. A Rows has no `state_dict`, so that a StatefulDataLoader keeps
    its place and not the data.

    Args:
        td: a TensorDict or a tensorclass with at least one batch dimension, in memory or mapped.

    Raises:
        LeafTypeError: `td` is no TensorDict or tensorclass.
        LayoutError: it has no batch dimension, and so no rows.

    Example:
        >>> from tensordict import TensorDict
        >>> rows = Rows(TensorDict(x=torch.arange(6).reshape(3, 2), batch_size=[3]))
        >>> len(rows), rows[-1]["x"].tolist()
        (3, [4, 5])
        >>> batch = rows.__getitems__([2, 0])
        >>> batch["x"].tolist(), batch.is_consolidated()
        ([[4, 5], [0, 1]], True)
    """

    def __init__(self, td: Any) -> None:
        if not is_tensor_collection(td) or not is_node(td):
            raise LeafTypeError(
                f"got a {type(td).__name__}: expected a TensorDict or a tensorclass with rows."
            )
        if not td.batch_size:
            raise LayoutError(
                f"got a {type(td).__name__} without batch dimensions, which has no rows: set its "
                "batch size first, `td.auto_batch_size_(1)`."
            )
        self.td = td if td.is_locked else td.copy().lock_()
        self._batches: dict[int, _Gather] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is not None:
            _check_can_be_sent(self._tree)
        return type(self), (self.td,)

    def __len__(self) -> int:
        return self.td.batch_size[0]

    def __getitem__(self, index: int) -> Any:
        """One row, as `td[index]` gives it: views where that gives views.

        Raises:
            IndexError: there is no such row.
        """
        place = as_index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"got row {place} of {len(self)}.")
        return self.td[place]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """The rows of a batch, in this order, as a consolidated tree of batch size `(n, ...)`.

        Args:
            indices: integers, negative ones counted from the end; a list, an array or a tensor.

        Raises:
            IndexError: there is no such row, or an index is no integer.
        """
        if not self._gathers:
            return consolidated(self.td[_index_of(indices, len(self))])
        with suppress(IndexError, RuntimeError, TypeError, ValueError):
            return self._gathered(torch.as_tensor(indices))  # torch checks what is most often right
        return self._gathered(_index_of(indices, len(self)))

    def _gathered(self, index: Tensor) -> Any:
        count = len(index)
        if count not in self._batches:
            self._batches[count] = _gather_of(self._tree, count)
        return _gathered(self._batches[count], index)

    @cached_property
    def _tree(self) -> Node:
        return tree_of(self.td)

    @cached_property
    def _gathers(self) -> bool:
        return _has_columns(self._tree)

    def __repr__(self) -> str:
        # Grain compares it when it resumes: it tells other data, and not where it lies.
        layout = layout_of(self.td)
        return f"{type(self).__name__}({len(self)} rows, layout {layout.fingerprint})"


def _index_of(indices: Any, count: int) -> Tensor:
    index = np.asarray(indices)
    if index.ndim != 1 or (index.dtype.kind not in "iu" and index.size):
        raise IndexError(f"got {indices!r}: expected a list of integers.")
    # A copy, for it may be the caller's own.
    index = index.astype(np.int64)
    if index.size and not (-count <= index.min() and index.max() < count):
        wrong = index[(index < -count) | (index >= count)]
        raise IndexError(f"got row {wrong[0]} of {count}.")
    index[index < 0] += count
    return torch.from_numpy(index)


def _check_can_be_sent(tree: Node) -> None:
    """Refuses what maps a file: torch sends memory by its descriptor, and that has none."""
    for path, leaf in zip(paths_of(tree), leaves_of(tree), strict=True):
        if type(leaf) is Tensor and leaf.is_cpu and leaf.untyped_storage().filename is not None:
            raise LayoutError(
                f"{path_str(path)}: got a tensor that maps a file, which torch cannot send to a "
                "spawned worker. Store the data by `td.memmap(folder)`, fork the workers, or load "
                "it in them."
            )


def _has_columns(tree: Node) -> bool:
    """Whether a row is one of each leaf, of plain tensors on the CPU, and of nothing else."""
    for _, node in walk_nodes(tree):
        if node.cls in BUILDERS or node.unbatched:
            return False
        if not all(isinstance(leaf, Tensor) and leaf.is_cpu for leaf in node.leaves):
            return False
    constants = [constant for _, own in constants_of(tree) for _, constant in own]
    return not any(isinstance(constant.value, PerElement) for constant in constants)


class _Leaf(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Gather(NamedTuple):
    """How a number of rows is gathered.

    Attributes:
        node: the batch; its leaves are dtypes and shapes.
        plan: its plan.
        sources: the leaves to gather from, in the order of the layout.
    """

    node: Node
    plan: Plan
    sources: Sequence[Tensor]


def _gather_of(tree: Node, count: int) -> _Gather:
    node = _resized(tree, count)
    check_nodes(node)
    plan = plan_of(node)
    sources = [leaf.detach().as_subclass(Tensor) for leaf in leaves_of(tree)]
    return _Gather(node, plan, plan.placed(sources))


def _resized(node: Node, count: int) -> Node:
    return replace(
        node,
        batch_size=(count, *node.batch_size[1:]),
        leaves=[_Leaf(leaf.dtype, (count, *leaf.shape[1:])) for leaf in node.leaves],
        nested=tuple([(key, _resized(child, count)) for key, child in node.nested]),
    )


def _gathered(gather: _Gather, index: Tensor) -> Any:
    def write(_: Tensor, views: list[Tensor]) -> None:
        for source, view in zip(gather.sources, views, strict=True):
            torch.index_select(source, 0, index, out=view)

    return packed(gather.node, gather.plan, write)
