"""Crossing over: TensorDict to ArrayDict and back, sharing memory."""

from tdbridge.convert.explain import LeafReport as LeafReport
from tdbridge.convert.explain import Report as Report
from tdbridge.convert.explain import explain as explain
from tdbridge.convert.to_jax import to_jax as to_jax
from tdbridge.convert.to_torch import to_torch as to_torch

__all__ = ["LeafReport", "Report", "explain", "to_jax", "to_torch"]
