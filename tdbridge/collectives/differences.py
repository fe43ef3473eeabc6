"""What to say when members disagree: which leaves differ, and on which ranks."""

from collections.abc import Mapping, Sequence, Set

from tdbridge.layout.spec import Layout, path_str


def what_differs(
    ranks: Sequence[int],
    calls: Sequence[str],
    steps: Sequence[str],
    bodies: Sequence[str],
    without: Sequence[bool],
) -> str:
    """The text of the error, equal on each member.

    Args:
        ranks: the global rank of each member.
        calls: what each has called.
        steps: how many calls each has made before.
        bodies: the leaves of each, as `leaf_lines` writes them; or `!` and an error.
        without: which members passed no tree.
    """
    sides = [f"on rank {rank}" for rank in ranks]
    if len({*calls}) > 1:
        by_side = dict(zip(sides, calls, strict=True))
        return f"the ranks call different things: {_by_value(by_side)}."
    call = calls[0]
    if len({*steps}) > 1:
        by_side = {side: f"{step} calls" for side, step in zip(sides, steps, strict=True)}
        return (
            f"{call}: the ranks have called other things before, in this group: "
            f"{_by_value(by_side)}. A rank left a call out, or another one raised an error in it."
        )
    pairs = list(zip(sides, bodies, strict=True))
    if failed := {side: body[1:].rstrip(". ") for side, body in pairs if body[:1] == "!"}:
        return f"{call}: a tree cannot be carried: {_by_value(failed)}."
    trees = {side: body for (side, body), no in zip(pairs, without, strict=True) if not no}
    if len({*trees.values()}) <= 1:
        missing = [side for side, no in zip(sides, without, strict=True) if no]
        return f"{call}: no tree was passed {_listed(missing)}."
    tables = {side: _table(body) for side, body in trees.items()}
    differ = _differing(tables)
    return f"{call}: the ranks hold trees of other layouts; nothing was written. {differ}."


def differences(sides: Mapping[str, Layout]) -> str:
    """Which leaves differ between layouts, and what each of them is where."""
    return _differing({side: _table(leaf_lines(layout)) for side, layout in sides.items()})


def leaf_lines(layout: Layout | None, left_out: Set[str] = frozenset()) -> str:
    """A line for each leaf: its path, its dtype and its shape, and whether it takes no part."""
    return "\n".join(
        f"{path_str(leaf.path)}|{leaf.dtype} {list(leaf.shape)}"
        + (" left out by where" if leaf.dtype in left_out else "")
        for leaf in (() if layout is None else layout.leaves)
    )


def _table(lines: str) -> dict[str, str]:
    pairs = [line.rpartition("|") for line in lines.splitlines()]
    return {path: what for path, _, what in pairs}


def _differing(tables: Mapping[str, Mapping[str, str]]) -> str:
    differ = []
    for path in sorted({path for table in tables.values() for path in table}):
        own = {side: table.get(path, "missing") for side, table in tables.items()}
        if len({*own.values()}) > 1:
            differ.append(f"{path}: {_by_value(own)}")
    return "; ".join(differ)


def _by_value(values: Mapping[str, str]) -> str:
    said = {value: [s for s, v in values.items() if v == value] for value in values.values()}
    return ", ".join(f"{value} {_listed(sides)}" for value, sides in said.items())


def _listed(sides: Sequence[str]) -> str:
    """`on ranks 0, 1` and not `on rank 0, on rank 1`."""
    ranks = [side.removeprefix("on rank ") for side in sides]
    return f"on ranks {', '.join(ranks)}" if len(ranks) > 1 and ranks != sides else ", ".join(sides)
