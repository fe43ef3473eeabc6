"""Trees with DTensors in collectives: which groups may do what with the shards of their members.

Members that hold the same shard, each of its own replica, may reduce it: a group that runs along
mesh dimensions over which the DTensor is replicated, as the `replicate` of HSDP. Along any other
dimension the sum of two shards, two different parts of the whole, means nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from tdbridge.collectives.groups import Members
from tdbridge.errors import CollectiveError
from tdbridge.layout.dtensors import has_dtensors
from tdbridge.layout.spec import Path, path_str
from tdbridge.layout.tree import leaves_of, paths_of, tree_of


def refuse_dtensors(tree: Any) -> None:
    """Raises if a tree has a DTensor: to cut one or to join it would communicate by itself."""
    node = tree_of(tree)
    check_shards(lambda: paths_of(node), leaves_of(node), None)


def check_shards(
    paths: Callable[[], Sequence[Path]], leaves: Sequence[Any], members: Members | None
) -> None:
    """Checks that the members hold the same shard of each DTensor among `leaves`.

    Args:
        paths: gives those of the leaves.
        leaves: any.
        members: the group, or None if the call is one for which DTensors make no sense.

    Raises:
        CollectiveError: they do not. It names the leaf and says what to do.
    """
    if not has_dtensors(leaves):
        return
    kinds: dict[Any, tuple[Path, DTensor]] = {}  # most leaves are cut alike
    for path, leaf in zip(paths(), leaves, strict=True):
        if isinstance(leaf, DTensor):
            kinds.setdefault((leaf.device_mesh, leaf.placements), (path, leaf))
    for path, leaf in kinds.values():
        if (reason := _why_not(leaf, members)) is not None:
            raise CollectiveError(
                f"{path_str(path)}: got a DTensor of {list(leaf.placements)} over the mesh "
                f"dimensions {_names(leaf)}: {reason}."
            )


def _why_not(leaf: DTensor, members: Members | None) -> str | None:
    if members is None:
        return (
            "only all_reduce, reduce and broadcast take DTensors, over a group along which they "
            "are replicated. Pass the local shards, to_local(), or the whole, full_tensor()"
        )
    if any(placement.is_partial() for placement in leaf.placements):
        return (
            "a Partial one is a sum that is still to be done. Call redistribute(placements=...) "
            "with Replicate() or Shard(dim) there first"
        )
    along = [dim for dim in _varying(leaf, members) if not leaf.placements[dim].is_replicate()]
    if not along:
        return None
    names = _names(leaf)
    cut = ", ".join(repr(names[dim]) for dim in along)
    free = [name for name, p in zip(names, leaf.placements, strict=True) if p.is_replicate()]
    where = f"(mesh, {free[0]!r})" if free else "a mesh dimension over which it is replicated"
    return (
        f"the ranks {members.ranks} of the group hold different shards of it, along {cut}. Pass "
        f"group={where}, or the whole tensors, full_tensor(), or redistribute(placements=...) with "
        "Replicate() there first"
    )


def _varying(leaf: DTensor, members: Members) -> list[int]:
    """The mesh dimensions along which the members of a group stand apart.

    Those outside of the mesh have one of their own, as a mesh per replica is: what they hold is
    compared by `shards_text`.
    """
    places = [(leaf.device_mesh.mesh == rank).nonzero().tolist() for rank in members.ranks]
    inside = [place[0] for place in places if place]
    return [dim for dim, at in enumerate(zip(*inside, strict=True)) if len({*at}) > 1]


def _names(leaf: DTensor) -> tuple[Any, ...]:
    mesh = leaf.device_mesh
    return tuple(mesh.mesh_dim_names or range(mesh.ndim))


def shards_text(leaves: Sequence[Any]) -> str:
    """Which shards this rank holds, in words that are equal where the shards are the same ones."""
    sharded = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    found = {(leaf.device_mesh, leaf.placements): leaf for leaf in sharded}
    return "; ".join(sorted({_shard_text(leaf) for leaf in found.values()}))


def _shard_text(leaf: DTensor) -> str:
    mesh, at = leaf.device_mesh, leaf.device_mesh.get_coordinate()
    cuts = [
        f"{placement!r} {at[dim] if at else 'none'} of {mesh.size(dim)}"
        for dim, placement in enumerate(leaf.placements)
        if not placement.is_replicate()
    ]
    return ", ".join(cuts) or "replicated"
