"""Trees on their way to other processes: by pickle, by a queue of multiprocessing, by Ray.

Importing tdbridge is all that pickle and queues need. A consolidated TensorDict, an ArrayDict and a
PackedArrayDict are one buffer and a short description each.
"""

from tdbridge.sending.install import install
from tdbridge.sending.ray import register_ray as register_ray

install()

__all__ = ["register_ray"]
