"""The calls between the processes of a jax.distributed job, for `group=` a `jax.sharding.Mesh`.

A member is a process, and sends from its first device in the mesh. What is sent lies in one array
over those devices, and a program of one operation per dtype runs on all of them: the calls over an
axis.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from torch import Tensor

from tdbridge.collectives import axis
from tdbridge.collectives.agreement import Check, agree, taking_part
from tdbridge.collectives.groups import Known, Members
from tdbridge.collectives.handle import Handle, told
from tdbridge.collectives.ops import Op
from tdbridge.collectives.reductions import call_of, chosen_segments, wide_of
from tdbridge.collectives.stacks import all_carried, given_back, parts_of
from tdbridge.collectives.trees import Carried, arrived, carried, new_buffer, whole_like
from tdbridge.collectives.wire import Where
from tdbridge.convert import to_jax
from tdbridge.errors import CollectiveError
from tdbridge.layout.placement import segments_of

_AXIS = "members"


@dataclass(frozen=True)
class MeshMembers(Members):
    """The processes of a mesh of JAX; `group` has the first device of each."""

    processes: tuple[int, ...]
    own_known: Known = field(default_factory=Known)

    @property
    def ranks(self) -> list[int]:
        """The process index of each member."""
        return list(self.processes)

    @property
    def known(self) -> Known:
        """What the members agreed on."""
        return self.own_known

    @property
    def device(self) -> torch.device:
        """What is received lies in the memory of the host."""
        return torch.device("cpu")

    def exchanged(self, own: Tensor) -> list[Tensor]:
        """What each member says of its tree."""
        (rows,) = _perform(self, _gather, (), [own])
        return list(torch.from_numpy(np.array(rows)))


@lru_cache(maxsize=64)
def members_of_mesh(mesh: Mesh) -> MeshMembers:
    """The processes that have devices in a mesh, in their order.

    Raises:
        CollectiveError: this process has none.
    """
    first: dict[int, Any] = {}
    for device in mesh.devices.flat:
        first.setdefault(device.process_index, device)
    processes = tuple(sorted(first))
    if jax.process_index() not in first:
        raise CollectiveError("this process has no device in the mesh.")
    devices = Mesh(np.array([first[process] for process in processes]), (_AXIS,))
    return MeshMembers(
        devices, processes.index(jax.process_index()), len(processes), processes
    )  # fmt: skip


def all_reduce(
    tree: Any, op: Op, members: MeshMembers, where: Where | None, accumulate: Any, check: Check
) -> Handle:
    """See `tdbridge.collectives.all_reduce`."""
    wide = wide_of(accumulate)
    call, check = call_of("all_reduce", op, wide), _each_time(check)
    with taking_part(members, call, check):
        own = carried(tree, written=True)
        chosen, left_out = chosen_segments(own.layout, op, wide, where)
    agree(members, call, own.layout, check, left_out=left_out)
    segments = [own.placement.segments[i] for i in chosen]
    with told(call, members):
        found = _perform(members, axis.all_reduce, (op, _AXIS, None, wide), segments)
    return Handle(call, members, [], partial(_finish, own, segments, found))


def reduce_scatter(
    trees: Any, op: Op, members: MeshMembers, where: Where | None, accumulate: Any, check: Check
) -> Handle:
    """See `tdbridge.collectives.reduce_scatter`."""
    wide = wide_of(accumulate)
    call, check = call_of("reduce_scatter", op, wide), _each_time(check)
    with taking_part(members, call, check):
        every = all_carried(parts_of(trees, members.size, "reduce_scatter"), "reduce_scatter")
        own = every[members.rank]
        chosen, left_out = chosen_segments(own.layout, op, wide, where)
    agree(members, call, own.layout, check, left_out=left_out)
    rows = [torch.stack([one.placement.segments[i] for one in every]) for i in chosen]
    with told(call, members):
        found = _perform(members, _reduce_rows, (op, wide), rows)
    storage = own.storage.clone()

    def finish() -> Any:
        flats = segments_of(own.layout, storage)
        _write([flats[i] for i in chosen], found)
        return own.like(whole_like(own, storage))

    return Handle(call, members, [], finish)


def broadcast(tree: Any, src: int, members: MeshMembers, check: Check, to: str) -> Handle:
    """See `tdbridge.collectives.broadcast`; `src` counts within the group."""
    call, check = f"broadcast(src={members.ranks[src]})", _each_time(check)
    with taking_part(members, call, check, src):
        own = None if tree is None else carried(tree, written=members.rank != src)
    layout = agree(members, call, own and own.layout, check, root=src)
    storage = own.storage if own is not None else new_buffer(layout, members)
    with told(call, members):
        found = _perform(members, axis.broadcast, (src, _AXIS), [storage])
    if own is None:

        def finish() -> Any:
            _write([storage], found)
            return arrived(layout, storage, to)

        return Handle(call, members, [], finish)
    if members.rank == src:
        return Handle(call, members, [], lambda: tree)
    return Handle(call, members, [], partial(_finish, own, [storage], found))


def all_gather(tree: Any, members: MeshMembers, stacked: bool, check: Check) -> Handle:
    """See `tdbridge.collectives.all_gather`."""
    call, check = "all_gather()", _each_time(check)
    with taking_part(members, call, check):
        own = carried(tree)
    agree(members, call, own.layout, check)
    return _rows_of_all(call, members, own, _gather, own.storage, stacked)


def all_to_all(trees: Any, members: MeshMembers, stacked: bool, check: Check) -> Handle:
    """See `tdbridge.collectives.all_to_all`."""
    call, check = "all_to_all()", _each_time(check)
    with taking_part(members, call, check):
        every = all_carried(parts_of(trees, members.size, "all_to_all"), "all_to_all")
    own = every[members.rank]
    agree(members, call, own.layout, check)
    rows = torch.stack([one.storage for one in every])
    return _rows_of_all(call, members, own, _exchange, rows, stacked)


def _rows_of_all(
    call: str, members: MeshMembers, own: Carried, program: Any, sent: Tensor, stacked: bool
) -> Handle:
    with told(call, members):
        (found,) = _perform(members, program, (), [sent])

    def finish() -> Any:
        rows = torch.empty(members.size, len(own.storage), dtype=torch.uint8)
        _write([rows], [found])
        return given_back(own, rows if stacked else [row.clone() for row in rows], stacked)

    return Handle(call, members, [], finish)


def _each_time(check: Check) -> Check:
    """JAX has no connections apart, so that data of two layouts could meet: all ask each time."""
    return "always" if check == "first" else check


def _finish(own: Carried, segments: Sequence[Tensor], found: Sequence[Any]) -> Any:
    _write(segments, found)
    return own.update(own.whole)


def _write(tensors: Sequence[Tensor], arrays: Sequence[Any]) -> None:
    """By bytes: numpy has some dtypes from ml_dtypes that torch does not take from it."""
    for tensor, array in zip(tensors, arrays, strict=True):
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = raw


# --- programs


def _gather(arrays: Any) -> Any:
    return axis.all_gather(arrays, _AXIS, True)


def _exchange(arrays: Any) -> Any:
    return axis.all_to_all(_trees(arrays), _AXIS, True)


def _reduce_rows(arrays: Any, op: Op, wide: Any) -> Any:
    return axis.reduce_scatter(_trees(arrays), op, _AXIS, None, wide)


def _trees(arrays: Any) -> list[Any]:
    """A tree for each member, from arrays with a row for each."""
    return [[array[i] for array in arrays] for i in range(axis.members_of(_AXIS))]


def _perform(
    members: MeshMembers, call: Callable[..., Any], args: tuple[Any, ...], own: Sequence[Tensor]
) -> list[Any]:
    """What `call` makes of the arrays of this member, together with those of the others."""
    if not own:
        return []
    sharding = NamedSharding(members.group, P(_AXIS))
    device = members.group.devices[members.rank]
    with jax.enable_x64(True):  # 64 bits stay 64 bits
        rows = [
            jax.make_array_from_single_device_arrays(
                (members.size, *tensor.shape),
                sharding,
                [jax.device_put(to_jax(tensor)[None], device)],
            )
            for tensor in own
        ]
        return [one.addressable_data(0)[0] for one in _program(members.group, call, args)(*rows)]


@lru_cache(maxsize=256)
def _program(mesh: Mesh, call: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    def run(*rows: Any) -> list[Any]:
        return [new[None] for new in call([row[0] for row in rows], *args)]

    return jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=P(_AXIS), out_specs=P(_AXIS), check_vma=False)
    )
