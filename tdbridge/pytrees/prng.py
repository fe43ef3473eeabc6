"""Typed PRNG keys of JAX, as torch can hold them: their data, and what they are keys of."""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from tensordict import TensorClass


class PRNGKey(TensorClass):
    """The torch side of an array of typed JAX PRNG keys.

    `to_torch` makes one of each array of keys, and `to_jax` makes the keys again. The data can be
    stored, sent and indexed in torch like any tensorclass.

    Attributes:
        key_data: uint32 of shape `[*batch_size, n]`, where n is 2 for threefry: what
            `jax.random.key_data` gives.
        impl: the name of the algorithm, as `jax.random.wrap_key_data` takes it.
    """

    key_data: torch.Tensor
    impl: str


def is_key(value: Any) -> bool:
    """Whether `value` is an array of typed keys, no tracer of one among them."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def impl_of(keys: jax.Array) -> str:
    """The name of the algorithm of an array of keys."""
    return str(jax.random.key_impl(keys))


def wrap_key(key_data: Any, impl: str) -> jax.Array:
    """Keys over what `jax.random.key_data` gave."""
    return jax.random.wrap_key_data(key_data, impl=impl)
