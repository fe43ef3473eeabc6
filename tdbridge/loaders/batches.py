"""The one buffer of a batch: filled once, in memory that the process of the consumer can map."""

from collections.abc import Callable
from multiprocessing import current_process
from typing import Any

import torch
from tensordict import lazy_stack
from torch import Tensor
from torch.utils.data import get_worker_info

from tdbridge._compat.torch import all_of_plain_type
from tdbridge.layout.allocate import allocate, allocate_shared
from tdbridge.layout.buffer import check_nodes, declare, planned, views_of
from tdbridge.layout.classes import Jagged
from tdbridge.layout.fill import fill
from tdbridge.layout.placement import addresses_in, placement_of
from tdbridge.layout.plan import Plan
from tdbridge.layout.spec import ALIGNMENT, Layout
from tdbridge.layout.tree import Node, rebuild, tree_of, walk_nodes

_CPU = torch.device("cpu")


def in_worker() -> bool:
    """Whether batches go to another process: this one serves a DataLoader, or Grain, or another.

    Workers are daemons, unlike the ranks of a job, whose batches stay where they are.
    """
    return get_worker_info() is not None or current_process().daemon


def new_buffer(layout: Layout) -> Tensor:
    """The buffer of a batch: shared memory in a worker."""
    if in_worker():
        return allocate_shared(layout)
    with allocate(layout, _CPU) as storage:
        return storage


def packed(node: Node, plan: Plan, write: Callable[[Tensor, list[Tensor]], None]) -> Any:
    """The consolidated tree that a node describes.

    Args:
        node: the tree; of its leaves no more is asked than the plan was made of.
        plan: its plan.
        write: fills the buffer, given with the leaves in it in the order of the layout.
    """
    storage = new_buffer(plan.layout)
    views = views_of(plan.layout, storage)
    write(storage, views)
    new = rebuild(node, iter([views[i] for i in plan.order]), _CPU)
    return declare(new, node, plan, storage, views)


def consolidated(td: Any) -> Any:
    """`td` as `consolidate` gives it; in a worker in shared memory.

    One that is so already is returned itself. One whose leaves still lie in such a buffer, as they
    do after Grain took a batch of a worker apart and put it together, is locked and declared so.
    """
    placement = placement_of(td)
    if placement is not None and _is_in_place(placement.storage):
        return td
    tree = tree_of(td)
    check_nodes(tree)
    leaves, plan = planned(tree)
    storage = _buffer_of(plan, leaves)
    if storage is not None and _is_in_place(storage):
        return declare(td, tree, plan, storage, plan.placed(leaves))

    def write(storage: Tensor, views: list[Tensor]) -> None:
        fill(plan.layout, storage, views, plan.placed(leaves))

    return packed(tree, plan, write)


def _is_in_place(storage: Tensor) -> bool:
    # What maps a file is shared too, but a queue cannot send it: the reader would wait for ever.
    mapped = storage.is_cpu and storage.untyped_storage().filename is not None
    return storage.is_cpu and (not in_worker() or (storage.is_shared() and not mapped))


def _buffer_of(plan: Plan, leaves: list[Tensor]) -> Tensor | None:
    """The buffer that the leaves lie in as the plan has it, and fill; None when there is none."""
    if not leaves or not all_of_plain_type(leaves) or any(map(Tensor.is_conj, leaves)):
        return None
    if not 0 < plan.layout.nbytes == leaves[0].untyped_storage().nbytes():
        return None
    whole = torch.empty(0, dtype=torch.uint8, device=leaves[0].device)
    whole = whole.set_(leaves[0].untyped_storage())  # pyright: ignore[reportCallIssue, reportArgumentType]
    places = addresses_in(plan.layout, whole.data_ptr())
    placed = plan.placed(leaves)
    in_place = list(map(Tensor.data_ptr, placed)) == places
    aligned = whole.data_ptr() % ALIGNMENT == 0
    return whole if in_place and aligned and all(map(Tensor.is_contiguous, placed)) else None


def stacked(samples: list[Any]) -> Any:
    """TensorDicts of kinds that have no columns, as stock stacks them, then consolidated."""
    jagged = any(node.cls is Jagged for _, node in walk_nodes(tree_of(samples[0])))
    # No stack of jagged tensors is one: their ragged dimensions are symbols that never agree.
    return consolidated(lazy_stack(samples) if jagged else torch.stack(samples))
