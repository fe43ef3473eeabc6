"""The same tree as JAX and optree see it."""

from tdbridge.pytrees.arraydict import ArrayDict as ArrayDict
from tdbridge.pytrees.packed import PackedArrayDict as PackedArrayDict
from tdbridge.pytrees.prng import PRNGKey as PRNGKey
from tdbridge.pytrees.register import register as register
from tdbridge.pytrees.register import register_all

register_all()

__all__ = ["ArrayDict", "PRNGKey", "PackedArrayDict", "register"]
