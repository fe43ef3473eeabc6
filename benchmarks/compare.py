"""Whether two contenders gave the same values, whatever framework each of them uses."""

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch

Values = Mapping[str, np.ndarray]


def flat_values(tree: Any) -> dict[str, np.ndarray]:
    """Map dotted paths to NumPy arrays, for a nested mapping or sequence of either framework.

    >>> flat_values({"a": [torch.ones(2)]})
    {'a.0': array([1., 1.], dtype=float32)}
    """
    return {".".join(path): as_numpy(leaf) for path, leaf in _walk(tree, ())}


def as_numpy(leaf: Any) -> np.ndarray:
    """Return a leaf as a NumPy array of the same dtype, those of ml_dtypes included."""
    if not isinstance(leaf, torch.Tensor):
        return np.asarray(leaf)
    leaf = leaf.detach().cpu().resolve_conj().resolve_neg()
    name = str(leaf.dtype).removeprefix("torch.")
    if not hasattr(ml_dtypes, name):
        return leaf.numpy()
    # torch does not hand these to NumPy itself; the bits are the same.
    bits = {1: torch.uint8, 2: torch.uint16}[leaf.itemsize]
    return leaf.view(bits).numpy().view(getattr(ml_dtypes, name))


def difference(ours: Values, theirs: Values) -> str | None:
    """Say what first differs between two results: paths, dtypes, shapes or values; or None."""
    if lone := sorted(set(ours) ^ set(theirs)):
        return f"{lone[0]!r} is only in one of them"
    for path, mine in ours.items():
        if not _equal(mine, theirs[path]):
            return f"{path!r} is {_shown(mine)} in ours and {_shown(theirs[path])} in theirs"
    return None


def _walk(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    # Neither a Tensor nor an Array has `items`; TensorDict, tensorclasses and ArrayDict do.
    if hasattr(tree, "items"):
        children = tree.items()
    elif isinstance(tree, list | tuple):
        children = enumerate(tree)
    else:
        yield path, tree
        return
    for key, child in children:
        yield from _walk(child, (*path, str(key)))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    # Only these kinds know NaN; "V" is how the dtypes of ml_dtypes present themselves.
    same_kind = a.dtype == b.dtype
    return same_kind and np.array_equal(a, b, equal_nan=a.dtype.kind in "fcV")


def _shown(array: np.ndarray) -> str:
    values = np.array2string(array.ravel(), threshold=4, edgeitems=2)
    return f"{array.dtype.name}{list(array.shape)} {values}"
