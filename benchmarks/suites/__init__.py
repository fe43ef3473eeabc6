"""The suites: each module here is one, found by its file name.

A suite has a function ``cases(quick: bool)`` that gives its cases, smaller ones if ``quick``.
"""

import importlib
import pkgutil
from collections.abc import Iterable

from benchmarks.case import Case


def names() -> list[str]:
    """Return the names of all suites; finding them imports none of them."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if not name.startswith("_"))


def cases(name: str, quick: bool) -> Iterable[Case]:
    """Return the cases of one suite."""
    return importlib.import_module(f"{__name__}.{name}").cases(quick)
