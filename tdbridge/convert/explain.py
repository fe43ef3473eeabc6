"""What a conversion would share, copy or refuse, and why; nothing is converted."""

from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tdbridge.convert.leaves import crossing, take_apart
from tdbridge.convert.like import leaves_like
from tdbridge.convert.to_jax import crosses_to_jax, why_copied_to_jax, why_refused_to_jax
from tdbridge.convert.to_torch import crosses_to_torch, why_copied_to_torch, why_refused_to_torch
from tdbridge.layout.spec import Path, path_str

Fate = Literal["shared", "copied", "refused"]


@dataclass(frozen=True)
class LeafReport:
    """What happens to one leaf.

    Attributes:
        path: the leaf's path.
        dtype: its dtype now.
        shape: its shape.
        nbytes: its bytes now.
        fate: "shared", "copied" or "refused".
        reason: why it is not shared; "" when it is.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    fate: Fate
    reason: str


@dataclass(frozen=True)
class Report:
    """What a conversion would do to each leaf of a tree; prints as a table.

    Attributes:
        to: "jax" or "torch", where the leaves would go.
        rows: one per leaf that would cross, in the tree's order.
    """

    to: Literal["jax", "torch"]
    rows: tuple[LeafReport, ...]

    def nbytes(self, fate: Fate) -> int:
        """The bytes of all leaves of that fate."""
        return sum(row.nbytes for row in self.rows if row.fate == fate)

    def __str__(self) -> str:
        table = Table(title=f"to_{self.to}", title_justify="left")
        for name in ("leaf", "dtype", "shape", "bytes", "memory", "why"):
            table.add_column(name, justify="right" if name == "bytes" else "left")
        for row in self.rows:
            shape = "[" + ",".join(map(str, row.shape)) + "]"
            cells = (path_str(row.path), row.dtype, shape, f"{row.nbytes:,}", row.fate, row.reason)
            table.add_row(*map(escape, cells))
        totals = (f"{self.nbytes(fate):,} bytes {fate}" for fate in ("shared", "copied", "refused"))
        text = StringIO()
        console = Console(file=text, width=200, color_system=None)
        console.print(table)
        console.print(", ".join(totals))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    __repr__ = __str__


def explain(tree: Any, *, to: Literal["jax", "torch"], like: Any = None) -> Report:
    """Says for each leaf whether `to_jax` or `to_torch` would share, copy or refuse it, and why.

    Nothing is converted, moved or copied, and no value is read: an int64 leaf that would be
    narrowed counts as copied, although `to_jax` raises if one of its values does not fit.

    Args:
        tree: what would be given to `to_jax` or `to_torch`.
        to: which of the two.
        like: what would be given to `to_torch` as `like`.

    Returns:
        A report that prints as a table.

    Raises:
        LeafTypeError: a node is of a kind that is not carried at all.
        LayoutError: `like` has other paths.

    Example:
        >>> import torch
        >>> report = explain({"x": torch.ones(4, 3), "y": torch.ones(4, 3).t()}, to="jax")
        >>> [(row.path, row.fate, row.reason) for row in report.rows]
        [(('x',), 'shared', ''), (('y',), 'copied', 'its strides (1, 3) are not row-major')]
    """
    rules = {
        "jax": (crosses_to_jax, why_refused_to_jax, why_copied_to_jax),
        "torch": (crosses_to_torch, why_refused_to_torch, why_copied_to_torch),
    }
    if to not in rules:
        raise ValueError(f'to is "jax" or "torch", got {to!r}.')
    if like is not None and to != "torch":
        raise ValueError("`like` is an argument of to_torch alone.")
    crosses, why_not, why_copied = rules[to]
    parts = take_apart(tree)
    paths = parts.paths()
    likes = {} if like is None else leaves_like(parts, like)
    rows = []
    for i in crossing(parts, crosses):
        given = (likes[paths[i]],) if likes else ()
        rows.append(_row(paths[i], parts.leaves[i], given, why_not, why_copied))
    return Report(to, tuple(rows))


def _row(path: Path, leaf: Any, like: tuple[Any, ...], why_not: Any, why_copied: Any) -> LeafReport:
    refused = why_not(leaf, *like)
    reason = refused or why_copied(leaf, *like) or ""
    fate: Fate = "refused" if refused else "copied" if reason else "shared"
    dtype = str(getattr(leaf, "dtype", type(leaf).__name__)).removeprefix("torch.")
    shape = () if refused else tuple(leaf.shape)
    nbytes = 0 if refused else int(leaf.nbytes)
    return LeafReport(path, dtype, shape, nbytes, fate, reason)
