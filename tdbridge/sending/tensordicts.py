"""TensorDicts in pickles: a consolidated one as its layout and its buffer."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from tensordict import is_tensor_collection

from tdbridge._compat.tensordict import Reduce, consolidated_storage, tensordict_of
from tdbridge.errors import LayoutError, LeafTypeError
from tdbridge.layout.buffer import consolidate, declare, placement_for, views_of
from tdbridge.layout.placement import Placement, placement_of
from tdbridge.layout.tree import rebuild
from tdbridge.sending.memory import Whole, received, shared
from tdbridge.sending.nodes import Values, described, values_of
from tdbridge.sending.partial import looks_at_little, plain_leaves, shards_share_memory
from tdbridge.sending.text import plan_from, text_of


def reduce_tensordict(td: Any, protocol: int, stock: Reduce) -> Any:
    """How pickle reduces a TensorDict.

    Below protocol 5 in the format of stock, which can be read where tdbridge is not; from it on as
    one buffer out of band, if it is in one buffer of ours. `stock` gets everything else.
    """
    if protocol < 5:
        alone = _is_partial(td) or shards_share_memory(td)
        return stock(_with_own_memory(td) if alone else td)
    found = sent(td)
    if found is None and _is_partial(td):
        found = _compacted(td)
    if found is None and shards_share_memory(td):
        td = _with_own_memory(td)
    return stock(td) if found is None else found


def queue_reduction(stock: Reduce) -> Reduce:
    """How a queue of multiprocessing does, which shares the memory: of a slice too, as stock."""

    def reduce(td: Any) -> Any:
        placement = _placement(td)
        if placement is None:
            return stock(td)
        return _reduction(td, placement, shared(placement.storage))

    return reduce


def sent(td: Any, **options: Any) -> Any | None:
    """The reduction of a consolidated tree on the CPU; None of any other one.

    Args:
        td: a TensorDict.
        options: what `rebuild_tensordict` is told besides.
    """
    placement = _placement(td)
    if placement is None:
        return None
    return _reduction(td, placement, Whole(placement.storage), **options)


def _placement(td: Any) -> Placement | None:
    """Where the leaves of a tree are that is in one buffer on the CPU."""
    with suppress(LeafTypeError):  # stock has consolidated what we do not carry
        placement = placement_for(td)
        return placement if placement is not None and placement.storage.is_cpu else None


def _is_partial(td: Any) -> bool:
    if placement_of(td) is not None:
        return False
    leaves = plain_leaves(td)
    return bool(leaves) and looks_at_little(leaves, consolidated_storage(td))


def _compacted(td: Any) -> Any | None:
    """The reduction of a copy of a tree, in one buffer of its own."""
    try:
        return sent(consolidate(td), locked=td.is_locked)
    except (LeafTypeError, LayoutError):  # dtypes and classes that we do not know
        return None


def _with_own_memory(td: Any) -> Any:
    new = td.clone()
    return new.lock_() if td.is_locked else new


def _reduction(td: Any, placement: Placement, memory: Any, **options: Any) -> Any:
    values = values_of(placement.constants)
    devices = list(_devices(td, placement.plan.skeleton))
    if True not in devices:
        devices = []
    named = options.get("locked", True), options.get("in_place", False)
    return rebuild_tensordict, (*text_of(placement.plan), values, devices, memory, *named)


def _devices(td: Any, skeleton: Any) -> Iterator[bool]:
    """Whether each node declares a device, parents first."""
    yield is_tensor_collection(td) and td.device is not None
    *_, nested = skeleton
    for key, child in nested:
        yield from _devices(_child(td, key), child)


def _child(td: Any, key: str) -> Any:
    inner = tensordict_of(td)
    members = getattr(inner, "tensordicts", None)
    return inner.get(key) if members is None else members[int(key)]


def rebuild_tensordict(
    text: str,
    classes: tuple[type, ...],
    values: Values,
    devices: Sequence[bool],
    memory: Any,
    locked: bool,
    in_place: bool = False,
) -> Any:
    """The tree of a message, its leaves views of the one buffer.

    What is said of the tree is checked before anything is made of it; nothing is executed.

    Args:
        text: what `text_of` says of the tree.
        classes: the classes that it counts.
        values: the non-tensor values.
        devices: whether each node declares the device of the buffer; empty if none does.
        memory: the buffer, see `received`.
        locked: whether the tree is locked and consolidated; an unlocked one lies in one buffer, and
            is not declared to.
        in_place: see `received`.

    Raises:
        LayoutError: the parts of the message do not fit together.
        LeafTypeError: the leaves do not make what the tree consists of.
    """
    plan = plan_from(text, classes)
    storage = received(memory, plan.layout.nbytes, in_place=in_place)
    views = views_of(plan.layout, storage)
    node = described(plan.skeleton, values, devices, storage.device)
    new = rebuild(node, iter([views[i] for i in plan.order]), storage.device)
    return declare(new, node, plan, storage, views) if locked else new
