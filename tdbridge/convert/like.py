"""`like=`: the dtypes that a tree had before JAX narrowed it."""

from typing import Any

import ml_dtypes
import torch

from tdbridge.convert.leaves import Parts, refuse_paths, take_apart
from tdbridge.errors import LeafTypeError
from tdbridge.layout.dtypes import dtype_of
from tdbridge.layout.spec import Path
from tdbridge.pytrees.prng import is_key


def leaves_like(tree: Parts, like: Any) -> dict[Path, Any]:
    """The leaf of `like` at the path of each leaf of `tree`; None for PRNG keys, of one dtype each.

    Shapes are not compared: the batch that comes back need not be the one that went.

    Raises:
        LayoutError: `like` has other paths; the error lists them.
    """
    paths, parts = tree.paths(), take_apart(like)
    keys = {path for path, leaf in zip(paths, tree.leaves, strict=True) if is_key(leaf)}
    pairs = zip(parts.paths(), parts.leaves, strict=True)
    # In torch a key is a tree of its data.
    found = {p: leaf for p, leaf in pairs if not {p, p[:-1]} & keys} | dict.fromkeys(keys)
    known = set(paths)
    missing = [path for path in paths if path not in found]
    refuse_paths("like", missing, [path for path in found if path not in known])
    return found


def dtype_like(leaf: Any) -> torch.dtype:
    """The torch dtype of a leaf of `like`.

    Raises:
        LeafTypeError: it has none.
    """
    if not hasattr(leaf, "dtype"):
        raise LeafTypeError(
            f"a {type(leaf).__name__}, which has no dtype: pass a tensor or an array"
        )
    try:
        return dtype_of(leaf.dtype).in_torch
    except LeafTypeError:
        raise LeafTypeError(f"dtype {leaf.dtype}, which torch does not have") from None


def why_not_like(array: Any, leaf: Any) -> str | None:
    """Why an array, which can be carried, cannot get the dtype of a leaf, or None when it can."""
    source = dtype_of(array.dtype)
    try:
        target = dtype_like(leaf)
    except LeafTypeError as error:
        return f"{source.name}, and in `like` {error}"
    if is_exact(source.in_torch, target):
        return None
    return (
        f"{source.name}, and in `like` {dtype_of(target).name}, which does not hold each of its "
        "values: cast the tensor in torch"
    )


def why_cast(array: Any, leaf: Any) -> str | None:
    """Why an array that can get the dtype of a leaf is copied for it, or None when it has it."""
    source, target = dtype_of(array.dtype), dtype_of(dtype_like(leaf))
    return None if source is target else f"{source.name} becomes {target.name}, as in `like`"


_IEEE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def is_exact(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast from `source` to `target` changes no value, infinities and -0.0 included."""
    if source == target:
        return True
    if source.is_complex and not target.is_complex:
        return False
    source, target = source.to_real(), target.to_real()
    if source == target:
        return True
    if source.is_floating_point:
        return target in _IEEE and _holds_floats(source, target)
    low, high = _bounds(source)
    if target in _IEEE:  # float8 has no room: fnuz lacks -0.0, fn infinities, e8m0fnu even 0
        return max(-low, high) <= 2 ** (_finfo(target).nmant + 1)
    if target.is_floating_point:
        return False
    return _bounds(target)[0] <= low and high <= _bounds(target)[1]


def _holds_floats(source: torch.dtype, target: torch.dtype) -> bool:
    one, other = _finfo(source), _finfo(target)
    return (
        one.nmant <= other.nmant
        and float(one.max) <= float(other.max)
        and float(one.smallest_subnormal) >= float(other.smallest_subnormal)
    )


def _bounds(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return info.min, info.max


def _finfo(dtype: torch.dtype) -> Any:
    return ml_dtypes.finfo(dtype_of(dtype).in_numpy)
