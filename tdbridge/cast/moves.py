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

from tdbridge._compat.torch import copy_all
from tdbridge.cast.numbers import one_nan
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.placement import segments_of
from tdbridge.layout.spec import Layout


class Move(NamedTuple):
    """`rows` times `numel` elements, `step` apart; the segments and starts on either side."""

    old: str
    new: str
    rows: int
    numel: int
    old_start: int
    old_step: int
    new_start: int
    new_step: int


def move(
    layouts: tuple[Layout, Layout],
    storages: tuple[Tensor, Tensor],
    leaves: tuple[Sequence[Tensor], Sequence[Tensor]],
) -> None:
    """Casts what lies in one buffer into another one.

    Args:
        layouts: the old one, and the new one: of the same paths and shapes.
        storages: the buffers.
        leaves: the leaves in the first, and the places for them in the second; both in the order
            of the second layout.
    """
    moves = _moves(*layouts)
    with torch.no_grad():
        if len(moves) > _MANY:  # odd sizes: one fused call takes less time than many
            pairs = list(zip(*leaves, strict=True))
            copy_all(leaves[1], leaves[0])
        else:
            pairs = _pairs(moves, layouts, storages)
            for old, new in pairs:
                new.copy_(old)
    settle(pairs)


def settle(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """What a cast by `copy_` leaves to be done, the second of each pair being that of the first."""
    for dtype in {new.dtype for old, new in pairs if old.dtype != new.dtype}:
        own = [(old, new) for old, new in pairs if new.dtype == dtype and old.dtype != dtype]
        one_nan(own, dtype_of(dtype))


_MANY = 16


def _pairs(
    moves: Sequence[Move], layouts: tuple[Layout, Layout], storages: tuple[Tensor, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    old, new = (
        {s.dtype: flat for s, flat in zip(own.segments, segments_of(own, storage), strict=True)}
        for own, storage in zip(layouts, storages, strict=True)
    )
    return [
        (
            _rows(old[m.old], m.rows, m.numel, m.old_step, m.old_start),
            _rows(new[m.new], m.rows, m.numel, m.new_step, m.new_start),
        )
        for m in moves
    ]


def _rows(flat: Tensor, count: int, numel: int, step: int, start: int) -> Tensor:
    if count == 1:
        return flat[start : start + numel]
    return torch.as_strided(flat, (count, numel), (step, 1), flat.storage_offset() + start)


@lru_cache(maxsize=256)
def _moves(old: Layout, new: Layout) -> list[Move]:
    starts, moves = {leaf.path: leaf for leaf in old.leaves}, []
    bases = [{s.dtype: s.offset for s in layout.segments} for layout in (old, new)]
    for leaf in new.leaves:
        was = starts[leaf.path]
        start = (was.offset - bases[0][was.dtype]) // dtype_of(was.dtype).itemsize
        stop = (leaf.offset - bases[1][leaf.dtype]) // dtype_of(leaf.dtype).itemsize
        one = Move(was.dtype, leaf.dtype, 1, leaf.numel, start, 0, stop, 0)
        if leaf.numel:
            moves.append(one)
    return _grouped(_grouped(moves, _flat), _row)


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
