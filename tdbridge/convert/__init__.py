"""Crossing over: TensorDict to ArrayDict and back, sharing memory."""

from tdbridge.convert.to_jax import to_jax as to_jax
from tdbridge.convert.to_torch import to_torch as to_torch

__all__ = ["to_jax", "to_torch"]
