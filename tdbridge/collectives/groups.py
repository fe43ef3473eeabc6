"""Who takes part: a process group of torch.distributed, and what its members agreed on so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tdbridge._compat.torch import timeout_of
from tdbridge.errors import CollectiveError
from tdbridge.layout.spec import Layout


@dataclass
class Known:
    """What all members of a group know, and know of each other that they know.

    Attributes:
        calls: how many collectives all have agreed on.
        last: by call, its arguments and the bits of the leaves that all had the last time.
        layouts: by call, the layout for a rank that has no tree, or its text.
        listening: the calls that some rank has no tree for, so that all ask each time.
        lost: why nothing can be exchanged any more, if so.
        sent: by peer and tag, the layouts that it was sent.
        received: by peer, tag and fingerprint, the layouts that it sent.
        pending: the receives that were begun, by peer and tag, in their order.
    """

    calls: int = 0
    last: dict[Any, tuple[str, int]] = field(default_factory=dict)
    layouts: dict[Any, Layout | str] = field(default_factory=dict)
    listening: set[Any] = field(default_factory=set)
    lost: str = ""
    sent: set[tuple[int, int, str]] = field(default_factory=set)
    received: dict[tuple[int, int, str], Layout] = field(default_factory=dict)
    pending: list[tuple[int | None, int, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Members:
    """A process group, seen from this rank; ranks count within the group."""

    group: Any
    rank: int
    size: int

    @property
    def ranks(self) -> list[int]:
        """The global rank of each member."""
        return dist.get_process_group_ranks(self.group)

    @property
    def known(self) -> Known:
        """What the members agreed on, as long as the group lives."""
        return _KNOWN.setdefault(self.group, Known())

    @property
    def device(self) -> torch.device:
        """Where a group sends from: the CPU, if it has an engine for that."""
        backends = dist.get_backend_config(self.group)
        return torch.device("cpu" if "cpu" in backends or "gloo" in backends else "cuda")

    def exchanged(self, own: torch.Tensor) -> list[torch.Tensor]:
        """What each member says of its tree: a tensor of the same size on all, apart from data."""
        every = [torch.empty_like(own) for _ in range(self.size)]
        control_of(self).allgather([every], [own]).wait()
        return every

    def member(self, rank: int | None, group_rank: int | None, name: str) -> int:
        """The rank within the group, from one of both, as torch's own calls take them.

        Raises:
            CollectiveError: none or both are given, or no member has that rank.
        """
        if (rank is None) == (group_rank is None):
            raise CollectiveError(f"pass either {name}, a global rank, or group_{name}.")
        found = group_rank if rank is None else dict(zip(self.ranks, range(self.size))).get(rank)  # noqa: B905
        if found is None or not 0 <= found < self.size:
            given = f"{name}={rank}" if rank is not None else f"group_{name}={group_rank}"
            raise CollectiveError(f"got {given}: the group has the global ranks {self.ranks}.")
        return found


_KNOWN: WeakKeyDictionary[dist.ProcessGroup, Known] = WeakKeyDictionary()
_CONTROL: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()


def members_of(group: Any) -> Members:
    """The members that `group` stands for.

    Args:
        group: a process group, None for the default one, a DeviceMesh of one dimension, or a pair
            of a DeviceMesh and one of its dimensions, by name or by number.

    Raises:
        CollectiveError: it is none of these, or this process is no member.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise CollectiveError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() "
            "first."
        )
    found = _process_group(group)
    # `new_group` gives a number to those that are no members.
    if found == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(found) < 0:
        raise CollectiveError("this process is no member of the group.")
    return Members(found, dist.get_rank(found), dist.get_world_size(found))


def _process_group(group: Any) -> Any:
    if group is None:
        return dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or tuple(range(group.ndim))
            raise CollectiveError(
                f"got a DeviceMesh of {group.ndim} dimensions {names}: pass (mesh, dimension)."
            )
        return group.get_group()
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        mesh, dim = group
        return mesh.get_group(dim)
    if isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER:
        return group
    raise CollectiveError(
        f"got group={group!r}: pass a ProcessGroup, a DeviceMesh, (DeviceMesh, dimension), or "
        "None for the default group."
    )


def control_of(members: Members) -> Any:
    """Connections among the members for what they say about their trees, over gloo.

    Apart from the data: a rank that asks and one that does not ask wait for each other until the
    timeout, where a question that met another rank's data would be taken for data.

    Made by itself and not by `new_group`, which names a group by how many groups each process has
    made before: members that are in other subgroups too would wait for each other.
    """
    if (control := _CONTROL.get(members.group)) is None:
        store = dist.PrefixStore("tdbridge", members.group.get_group_store())  # pyright: ignore
        timeout = timeout_of(members.group)
        control = dist.ProcessGroupGloo(store, members.rank, members.size, timeout)
        _CONTROL[members.group] = control
    return control


def gathered(members: Members, values: Sequence[int]) -> list[list[int]]:
    """A few integers of each member, 8 bytes each."""
    own = torch.tensor(list(values), dtype=torch.int64, device="cpu")
    return [part.tolist() for part in members.exchanged(own)]


def gathered_texts(members: Members, text: str) -> list[str]:
    """A text of each member."""
    raw = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    sizes = [size for (size,) in gathered(members, [len(raw)])]
    own = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    own[: len(raw)] = raw
    every = members.exchanged(own)
    return [bytes(part[:size].tolist()).decode() for part, size in zip(every, sizes, strict=True)]
