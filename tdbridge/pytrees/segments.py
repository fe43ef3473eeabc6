"""Slots: where each leaf of a packed tree is, and how it is taken out of its segment."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from tdbridge._compat.jax import put
from tdbridge.errors import LeafTypeError
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.spec import Layout, Path, path_str
from tdbridge.layout.tree import Node, leaves_of
from tdbridge.pytrees.arraydict import ArrayDict
from tdbridge.pytrees.nodes import arraydict_of
from tdbridge.pytrees.prng import PRNGKey


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a leaf is: elements `start` to `stop` of a segment of `length`; its shape and dtype.

    Places count elements, so that they hold for segments that were cast to another dtype.
    """

    segment: int
    start: int
    stop: int
    length: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        """The number of dimensions of the leaf."""
        return len(self.shape)


def slots_of(layout: Layout) -> ArrayDict:
    """The tree that a layout describes, with a `Slot` in the place of each leaf.

    Raises:
        LeafTypeError: it holds PRNG keys, which are no numbers to be cast and added.
    """
    # Kept with this layout and not by its value: one that is equal may hold other non-tensor
    # values by now, since a list or a dict can be written to.
    kept = vars(layout)
    if "slots" not in kept:
        kept["slots"] = _slots_of(layout)
    return kept["slots"]


def _slots_of(layout: Layout) -> ArrayDict:
    nodes: dict[Path, Node] = {}
    slots: dict[Path, dict[str, Slot]] = {spec.path: {} for spec in layout.nodes}
    for path, slot in _places(layout):
        slots[path[:-1]][path[-1]] = slot
    for spec in layout.nodes:  # parents first
        if spec.cls is PRNGKey:
            raise LeafTypeError(
                f"{path_str(spec.path)}: got PRNG keys, which cannot be packed: keep them beside "
                "the packed tree."
            )
        nodes[spec.path] = node = Node(
            source=None,
            cls=spec.cls,
            batch_size=spec.batch_size,
            names=spec.names,
            constants=spec.constants,
            keys=tuple(slots[spec.path]),
            leaves=list(slots[spec.path].values()),
            nested=(),
            unbatched=frozenset(spec.unbatched),
        )
        if spec.path:
            nodes[spec.path[:-1]].nested += ((spec.path[-1], node),)
    return arraydict_of(nodes[()], iter(leaves_of(nodes[()])))


def _places(layout: Layout) -> list[tuple[Path, Slot]]:
    numbers = {segment.dtype: i for i, segment in enumerate(layout.segments)}
    places = []
    for leaf in layout.leaves:
        number, size = numbers[leaf.dtype], dtype_of(leaf.dtype).itemsize
        segment = layout.segments[number]
        start, length = (leaf.offset - segment.offset) // size, segment.nbytes // size
        slot = Slot(number, start, start + leaf.numel, length, leaf.shape, leaf.dtype)
        places.append((leaf.path, slot))
    return places


def values_at(segments: Sequence[Any], slots: Sequence[Slot]) -> list[Any]:
    """The value at each slot; those of one segment are taken out of it together.

    Raises:
        ValueError: a segment is no flat array of its length.
    """
    values: list[Any] = [None] * len(slots)
    for number in {slot.segment for slot in slots}:
        places = [i for i, slot in enumerate(slots) if slot.segment == number]
        own = [slots[i] for i in places]
        _check_segment(segments[number], own[0])
        for i, value in zip(places, _taken(segments[number], own), strict=True):
            values[i] = value
    return values


def _check_segment(segment: Any, slot: Slot) -> None:
    shape = getattr(segment, "shape", None)
    if shape != (slot.length,):
        got = type(segment).__name__ if shape is None else f"shape {shape}"
        raise ValueError(
            f"the {slot.dtype} segment of this PackedArrayDict has shape ({slot.length},), got "
            f"{got}. A packed tree cannot be mapped over: call unpack() before vmap or scan."
        )


def _taken(segment: Any, slots: Sequence[Slot]) -> Sequence[Any]:
    if isinstance(segment, Tracer):
        return _split(_whole(segment), slots)
    if isinstance(segment, jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(slot.shape, segment.dtype) for slot in slots]
    on_device = hasattr(segment, "sharding")  # what numpy holds, float0 too, has none
    if on_device and not _is_on_one_cpu(segment):
        take = _slice if segment.shape[0] <= _INT32 else _slice_of_large
        whole = _whole(segment)
        return [take(whole, slot.start, slot.shape) for slot in slots]
    flat = np.asarray(segment)
    views = [flat[slot.start : slot.stop].reshape(slot.shape) for slot in slots]
    if not on_device:
        return views
    return put_as_they_are(views, segment.device, segment.committed)


def put_as_they_are(views: Sequence[np.ndarray], device: Any, committed: bool) -> list[jax.Array]:
    """Arrays over numpy memory on a CPU device; with x64 off too, 64 bits stay 64 bits."""
    with jax.enable_x64(True):
        arrays = put(views, device)
        return jax.device_put(arrays, device) if committed else arrays


def _is_on_one_cpu(array: jax.Array) -> bool:
    # Not `array.platform()`, which ends the process when the array was deleted.
    devices = array.sharding.device_set
    one = isinstance(array.sharding, SingleDeviceSharding)
    return one and all(device.platform == "cpu" for device in devices)


def _whole(segment: Any) -> Any:
    """Gathered once where it is split over a mesh.

    It would be gathered for each leaf else, or, over an explicit mesh, not at all: JAX raises.
    """
    traced = isinstance(segment, Tracer)
    # Of a tracer over an automatic mesh it says nothing: XLA sees to it there.
    sharding = jax.typeof(segment).sharding if traced else segment.sharding
    if not isinstance(sharding, NamedSharding) or not any(sharding.spec):
        return segment
    move = jax.sharding.reshard if traced else jax.device_put
    return move(segment, NamedSharding(sharding.mesh, PartitionSpec()))


def _split(segment: Any, slots: Sequence[Slot]) -> list[Any]:
    """By one operation: the gradient of a slice each would add up as many arrays of full length."""
    order = sorted(range(len(slots)), key=lambda i: slots[i].start)
    sizes, at = [], 0
    for i in order:
        sizes += [slots[i].start - at, slots[i].stop - slots[i].start]
        at = slots[i].stop
    parts = lax.split(segment, [*sizes, segment.shape[0] - at])
    values: list[Any] = [None] * len(slots)
    for i, part in zip(order, parts[1::2], strict=True):
        values[i] = part.reshape(slots[i].shape)
    return values


@partial(jax.jit, static_argnums=2)
def _slice(segment: Any, start: Any, shape: tuple[int, ...]) -> Any:
    """Compiled once for all leaves of one shape, wherever they are."""
    return lax.dynamic_slice(segment, (start,), (np.prod(shape, dtype=int),)).reshape(shape)


_INT32 = np.iinfo(np.int32).max


def _slice_of_large(segment: Any, start: int, shape: tuple[int, ...]) -> Any:
    """Compiled for each leaf: while x64 is off, JAX cannot pass on a place beyond 32 bits."""
    return lax.slice(segment, (start,), (start + np.prod(shape, dtype=int),)).reshape(shape)
