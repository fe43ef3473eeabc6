"""Crossing over: TensorDict to ArrayDict and back, sharing memory."""

from tdbridge.convert.aliasing import debug_aliasing as debug_aliasing
from tdbridge.convert.aliasing import written_since as written_since
from tdbridge.convert.explain import LeafReport as LeafReport
from tdbridge.convert.explain import Report as Report
from tdbridge.convert.explain import explain as explain
from tdbridge.convert.to_jax import to_jax as to_jax
from tdbridge.convert.to_torch import to_torch as to_torch

__all__ = [
    "LeafReport",
    "Report",
    "debug_aliasing",
    "explain",
    "to_jax",
    "to_torch",
    "written_since",
]
