"""Runs tensordict's own pytree tests against tdbridge's registration in JAX or in optree.

    python -m pytest -p tests.peers.tensordict_pytree --registry jax CHECKOUT/test/... -k pytree

Those tests call `torch.utils._pytree`. When a test file does, the same function of JAX or optree
answers; what torch and tensordict call themselves stays theirs, and so does every tree that has
nothing of ours in it.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import optree
import pytest
import torch.utils._pytree as stock
from tensordict import is_tensor_collection

import tdbridge  # noqa: F401 - registers
from tests.peers.swap import NotServed, Tally, report, swapped

TALLY = pytest.StashKey[Tally]()
# What gives the leaves, and what stands for which function of torch. The entries of an accessor of
# optree have the attribute `key`, as those of torch's paths.
REGISTRIES: dict[str, tuple[Callable[..., Any], dict[str, Callable[..., Any]]]] = {
    "jax": (
        jax.tree.leaves,
        {"tree_map": jax.tree.map, "tree_map_with_path": jax.tree.map_with_path},
    ),
    "optree": (
        optree.tree_leaves,
        {"tree_map": optree.tree_map, "tree_map_with_path": optree.tree_map_with_accessor},
    ),
}


def check(tree: Any, leaves_of: Callable[[Any], list[Any]]) -> None:
    """Raises NotServed for a tree that says nothing of our registration, or that it cannot keep."""
    nodes = stock.tree_leaves(tree, is_leaf=is_tensor_collection)
    nodes = [node for node in nodes if is_tensor_collection(node)]
    if not nodes:
        raise NotServed("no TensorDict in the tree")
    if any(node.device is not None for node in nodes):
        raise NotServed("a device, which our definition of a tree leaves out")
    try:
        leaves = leaves_of(tree)
    except ValueError as error:
        if "sorting pytree dictionary keys" not in str(error):
            raise
        raise NotServed("a dict whose keys JAX cannot sort") from None
    if kinds := sorted({type(leaf).__name__ for leaf in leaves if is_tensor_collection(leaf)}):
        raise NotServed(f"a {', '.join(kinds)}, which is a leaf")


def swap(patch: pytest.MonkeyPatch, registry: str, folder: str, tally: Tally) -> None:
    """Puts `registry` in the place of torch's pytrees for calls from files below `folder`."""
    leaves_of, functions = REGISTRIES[registry]

    def instead(name: str) -> Callable[..., Any]:
        theirs = getattr(stock, name)

        def ours(function: Any, tree: Any, *rests: Any, **options: Any) -> Any:
            check(tree, leaves_of)
            return functions[name](function, tree, *rests, **options)

        counted = swapped(ours, theirs, tally)

        def call(*args: Any, **kwargs: Any) -> Any:
            from_test = sys._getframe(1).f_code.co_filename.startswith(folder)
            return (counted if from_test else theirs)(*args, **kwargs)

        return call

    for name in functions:
        patch.setattr(stock, name, instead(name))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--registry", choices=sorted(REGISTRIES), default="jax")


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    config.stash[TALLY] = Tally()
    registry = str(config.getoption("--registry"))
    swap(patch, registry, str(config.rootpath), config.stash[TALLY])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    report(terminalreporter, f"pytrees of {config.getoption('--registry')}", config.stash[TALLY])
