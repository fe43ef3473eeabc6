"""Mixed precision: some leaves of a tree in another dtype, the same bits in torch and in JAX."""

from tdbridge.cast.cast import cast as cast
from tdbridge.cast.precision import Precision as Precision

__all__ = ["Precision", "cast"]
