"""Runs tensordict's own tests of `consolidate` against `tdbridge.consolidate`.

    python -m pytest -p tests.peers.tensordict_consolidate CHECKOUT/test/... -k consolidate

`num_threads` is a hint about speed, which ours takes and does not need. Any other option that ours
lacks, and every tree that it refuses, is left to stock.
"""

import importlib
import inspect
from typing import Any

import pytest
from tensordict import TensorClass, TensorDictBase

import tdbridge
from tdbridge._compat.tensordict import defined_classes
from tests.peers.swap import NotServed, Tally, report, swapped

TALLY = pytest.StashKey[Tally]()
SIGNATURE = inspect.signature(TensorDictBase.consolidate)
# `metadata` is always there with ours.
KNOWN = {"self", "filename", "device", "metadata", "num_threads"}


def consolidate(*args: Any, **kwargs: Any) -> Any:
    """`tdbridge.consolidate` behind the signature of stock's.

    Raises:
        NotServed: an option is given that ours does not have, or ours would differ by design.
    """
    given = SIGNATURE.bind(*args, **kwargs).arguments
    asked = {k: v for k, v in given.items() if v is not SIGNATURE.parameters[k].default}
    if lacking := sorted(asked.keys() - KNOWN):
        raise NotServed(f"option {', '.join(lacking)}")
    if "filename" in asked and given["self"].device is None:
        # `from_consolidated` gives a tree without a device for this file, stock's result and ours.
        raise NotServed(
            "a file for a tree without a device: stock's result is on cpu, ours has none"
        )
    return tdbridge.consolidate(
        given["self"], filename=given.get("filename"), device=given.get("device")
    )


def swap(patch: pytest.MonkeyPatch, tally: Tally) -> None:
    """Puts ours in the place of stock's: in TensorDict, in tensorclasses, and in those to come."""

    def instead(stock: Any) -> Any:
        return swapped(consolidate, stock, tally, (tdbridge.TdbridgeError,))

    patch.setattr(TensorDictBase, "consolidate", instead(TensorDictBase.consolidate))
    for cls in {TensorClass, *defined_classes()}:
        if "consolidate" in vars(cls):
            patch.setattr(cls, "consolidate", instead(vars(cls)["consolidate"]))

    # A tensorclass gets its methods from this function when it is defined.
    module: Any = importlib.import_module("tensordict.tensorclass")
    wrap = module._wrap_td_method

    def wrap_td_method(name: str, **options: Any) -> Any:
        method = wrap(name, **options)
        return instead(method) if name == "consolidate" else method

    patch.setattr(module, "_wrap_td_method", wrap_td_method)


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    config.stash[TALLY] = Tally()
    swap(patch, config.stash[TALLY])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    report(terminalreporter, "tdbridge.consolidate", config.stash[TALLY])
