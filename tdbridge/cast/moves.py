"""From the buffer of one layout to that of another with the same leaves, in few operations.

A leaf takes fewer bytes in a narrower dtype, and the padding after it changes, so that the places
of the elements do too. But leaves without padding on either side move as one, and equal leaves
that stand equally far apart move as the rows of one matrix.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tdbridge.cast.tensors import copy_cast
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.spec import Layout, Path


class Move(NamedTuple):
    """`rows` times `numel` elements, `step` apart; the segments and starts on either side."""

    old: int
    new: int
    rows: int
    numel: int
    old_start: int
    old_step: int
    new_start: int
    new_step: int


def move(moves: Sequence[Move], old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Casts what lies in one buffer into another one.

    Args:
        moves: what `moves_between` found.
        old: the segments of the first buffer.
        new: those of the second.
    """
    for m in moves:
        source = _rows(old[m.old], m.rows, m.numel, m.old_step, m.old_start)
        target = _rows(new[m.new], m.rows, m.numel, m.new_step, m.new_start)
        copy_cast(source, target)


def _rows(flat: Tensor, count: int, numel: int, step: int, start: int) -> Tensor:
    if count == 1:
        return flat[start : start + numel]
    return torch.as_strided(flat, (count, numel), (step, 1), flat.storage_offset() + start)


@lru_cache(maxsize=256)
def moves_between(old: Layout, new: Layout) -> list[Move] | None:
    """What to move from a buffer to one of another layout of the same paths and shapes.

    None for leaves of many odd sizes: one fused call takes less time for them.
    """
    moves, starts, stops = [], _places(old), _places(new)
    for leaf in new.leaves:
        (i, start), (j, stop) = starts[leaf.path], stops[leaf.path]
        if leaf.numel:
            moves.append(Move(i, j, 1, leaf.numel, start, 0, stop, 0))
    moves = _grouped(_grouped(moves, _flat), _row)
    return moves if len(moves) <= _MANY else None


_MANY = 16


def _places(layout: Layout) -> dict[Path, tuple[int, int]]:
    """The segment of each leaf, and where in it the leaf starts."""
    segments = {segment.dtype: (i, segment.offset) for i, segment in enumerate(layout.segments)}
    places = {}
    for leaf in layout.leaves:
        i, start = segments[leaf.dtype]
        places[leaf.path] = i, (leaf.offset - start) // dtype_of(leaf.dtype).itemsize
    return places


def _grouped(moves: Sequence[Move], joined: Callable[[Move, Move], Move | None]) -> list[Move]:
    found: list[Move] = []
    for one in moves:
        both = joined(found[-1], one) if found and found[-1][:2] == one[:2] else None
        if both is None:
            found.append(one)
        else:
            found[-1] = both
    return found


def _flat(last: Move, one: Move) -> Move | None:
    """Two pieces without a gap between them, as one."""
    places = last.old_start + last.numel, last.new_start + last.numel
    if (one.old_start, one.new_start) != places:
        return None
    return last._replace(numel=last.numel + one.numel)


def _row(last: Move, one: Move) -> Move | None:
    """Rows of a matrix, and the next one."""
    if one.numel != last.numel:
        return None
    old, new = one.old_start - last.old_start, one.new_start - last.new_start
    if last.rows == 1:
        return last._replace(rows=2, old_step=old, new_step=new) if old > 0 else None
    if (old, new) != (last.rows * last.old_step, last.rows * last.new_step):
        return None
    return last._replace(rows=last.rows + 1)
