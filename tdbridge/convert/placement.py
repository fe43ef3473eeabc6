"""`device=` and `sharding=`: where the arrays of a tree are put."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from tdbridge._compat.jax import wait
from tdbridge.convert.leaves import Parts, refuse_paths, with_paths
from tdbridge.convert.sharing import lines
from tdbridge.errors import LayoutError
from tdbridge.layout.spec import Path, path_str
from tdbridge.layout.tree import is_node, tree_of, walk_nodes

Places = Sequence[Any]
"""For each leaf the Sharding or Device that it goes to, None where it stays; empty if all stay."""


def places_of(parts: Parts, device: Any, sharding: Any) -> Places:
    """Reads the arguments of `to_jax`: where each leaf goes that is an array, or becomes one.

    Args:
        parts: the tree that is converted.
        device: a Device, the name of a platform, or None.
        sharding: a Sharding, a tree of them, or None.

    Raises:
        LayoutError: a tree of shardings lacks an entry for an array, or has one for no leaf.
        ValueError: the tree holds something else.
    """
    one = _target(device, sharding)
    if one is None:
        return ()
    if _is_place(one):
        return [one if isinstance(leaf, _ARRAYS) else None for leaf in parts.leaves]
    entries = dict(_entries(one))
    _check_entries(entries)
    paths = parts.paths()
    above = [_entry_above(path, entries) for path in paths]
    pairs = list(zip(above, [isinstance(leaf, _ARRAYS) for leaf in parts.leaves], strict=True))
    _check_paths(paths, pairs, entries)
    return [entries[entry] if moves and entry is not None else None for entry, moves in pairs]


def _target(device: Any, sharding: Any) -> Any:
    if isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return sharding if device is None else device


_ARRAYS = (jax.Array, torch.Tensor, np.ndarray)


def _check_paths(
    paths: Sequence[Path], pairs: Sequence[tuple[Path | None, bool]], entries: dict[Path, Any]
) -> None:
    used = {entry for entry, _ in pairs}
    # None asks for nothing, so that one of it too many does no harm: for a non-tensor entry, say.
    extra = [p for p, place in entries.items() if place is not None and p not in used]
    missing = [p for p, (at, moves) in zip(paths, pairs, strict=True) if moves and at is None]
    refuse_paths("sharding", missing, extra)


def _entry_above(path: Path, entries: dict[Path, Any]) -> Path | None:
    """The path of the entry that a leaf lies at or under."""
    starts = (path[:i] for i in range(len(path) + 1))
    return next((start for start in starts if start in entries), None)


def _entries(tree: Any) -> Iterator[tuple[Path, Any]]:
    """What a tree of shardings holds, by path, None included."""
    for path, value in with_paths(tree, lambda value: _is_place(value) or is_node(value)):
        if not is_node(value):
            yield path, value
            continue
        for at, node in walk_nodes(tree_of(value), path):
            yield from (((*at, k), leaf) for k, leaf in zip(node.keys, node.leaves, strict=True))
            # An ArrayDict or a TensorDict that was built of shardings has them as non-tensors.
            constants = ((k, constant.value) for k, constant in node.constants)
            yield from (((*at, k), value) for k, value in constants if _is_place(value))


def _is_place(value: Any) -> bool:
    return value is None or isinstance(value, (Sharding, jax.Device))


def _check_entries(entries: dict[Path, Any]) -> None:
    wrong = [
        f"  {path_str(path)}: got {value!r}."
        for path, value in entries.items()
        if not _is_place(value)
    ]
    if wrong:
        text = "\n".join(wrong)
        raise ValueError(
            "expected a jax.Device or a jax.sharding.Sharding, or a tree of them; of a "
            f"PartitionSpec, make a NamedSharding(mesh, spec):\n{text}"
        )


def refuse_uneven(parts: Parts, places: Places) -> None:
    """Refuses shardings that cut a leaf in unequal parts, or along a dimension that it lacks.

    Raises:
        LayoutError: there is one; it lists all such leaves.
    """
    # No places when nothing moves.
    reasons = [_why_uneven(*pair) for pair in zip(parts.leaves, places, strict=False)]
    if any(reasons):
        raise LayoutError(
            f"sharding= cannot cut:\n{lines(parts.paths(), reasons)}\n"
            "Pad the batch, or pass a tree of shardings with another one for these leaves."
        )


def _why_uneven(leaf: Any, place: Any) -> str | None:
    if not isinstance(place, Sharding):
        return None
    try:
        place.shard_shape(tuple(leaf.shape))
    except (ValueError, AssertionError, IndexError):
        what = place.spec if isinstance(place, NamedSharding) else place
        return f"shape {tuple(leaf.shape)} over {what} of {len(place.device_set)} devices"
    return None


def placed(leaves: Sequence[Any], places: Places) -> Sequence[Any]:
    """The leaves, those that have a place moved there and committed to it, in one call.

    Leaves that are one object and go to one place stay one. Waits until they are there: a transfer
    reads the memory of a tensor, which may be written as soon as the conversion is done.
    """
    pairs = {(id(leaf), place): leaf for leaf, place in zip(leaves, places, strict=False)}
    pairs = {key: leaf for key, leaf in pairs.items() if key[1] is not None}
    if not pairs:
        return leaves
    arrays = jax.device_put(list(pairs.values()), [place for _, place in pairs])
    wait([array for array in arrays if not isinstance(array, Tracer)])
    found = dict(zip(pairs, arrays, strict=True))
    return [found.get((id(leaf), place), leaf) for leaf, place in zip(leaves, places, strict=True)]
