"""What a tree has to be for its leaves to lie in one buffer."""

from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from tensordict import TensorDict, TensorDictParams
from torch import Tensor

from tdbridge._compat.torch import have_memory, why_not_dense
from tdbridge.errors import LayoutError, LeafTypeError
from tdbridge.layout.plan import Plan, plan_of
from tdbridge.layout.spec import Path, path_str
from tdbridge.layout.tree import BUILDERS, Node, leaves_of, paths_of, walk_nodes


def check_nodes(tree: Node) -> None:
    """Checks that a tree can be consolidated; parameters are made a TensorDict, as stock does.

    Raises:
        LeafTypeError: a node cannot be described in stock's metadata.
    """
    for path, node in walk_nodes(tree):
        if node.unbatched:
            where = path_str((*path, min(node.unbatched)))
            raise LeafTypeError(
                f"{where}: got an UnbatchedTensor, which a consolidated tensordict cannot hold: "
                "expand it over the batch, or keep it outside."
            )
        if node.cls in BUILDERS and "wrapped" in dict(node.constants):
            where = f"{path_str(path)}: " if path else ""
            raise LeafTypeError(
                f"{where}got a lazy stack of a tensorclass: call `.contiguous()` first."
            )
        if issubclass(node.cls, TensorDictParams):  # as stock does
            node.cls = TensorDict


def planned(tree: Node) -> tuple[list[Tensor], Plan]:
    """The leaves of a tree, and its plan.

    Raises:
        LeafTypeError: a leaf is not a dense tensor.
    """
    leaves = leaves_of(tree)
    with suppress(LeafTypeError):  # `_check_leaf` has more to say of the leaf
        plan = plan_of(tree)  # which knows no nested and no quantized leaves
        if have_memory(leaves):
            return leaves, plan
    for path, leaf in zip(paths_of(tree), leaves, strict=True):
        _check_leaf(path, leaf)
    return leaves, plan_of(tree)


def _check_leaf(path: Path, leaf: Any) -> None:
    if not isinstance(leaf, Tensor):
        raise LeafTypeError(
            f"{path_str(path)}: got a {type(leaf).__module__}.{type(leaf).__name__}, not a torch "
            "tensor. Call tdbridge.to_torch(td) first."
        )
    if (reason := why_not_dense(leaf)) is not None:
        raise LeafTypeError(f"{path_str(path)}: got {reason}.")


_CPU = torch.device("cpu")
_device, _is_cpu = attrgetter("device"), attrgetter("is_cpu")


def device_of_leaves(tree: Node, leaves: Sequence[Tensor]) -> torch.device:
    """The one device that all leaves of a tree lie on, or that it declares if it has none.

    Raises:
        LayoutError: they lie on several.
    """
    if leaves and all(map(_is_cpu, leaves)):
        return _CPU
    devices = {*map(_device, leaves)}
    if len(devices) > 1:
        pairs = zip(paths_of(tree), leaves, strict=True)
        where: dict[str, Path] = {str(leaf.device): path for path, leaf in pairs}
        listed = ", ".join(f"{path_str(path)} on {name}" for name, path in sorted(where.items()))
        raise LayoutError(f"the leaves lie on several devices ({listed}): pass `device=`.")
    declared = getattr(tree.source, "device", None)
    return next(iter(devices), declared or _CPU)
