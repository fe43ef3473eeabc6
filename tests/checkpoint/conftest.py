"""Eight CPU devices as one mesh."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh


@pytest.fixture
def devices():
    """The mesh of this process and `device_put`."""
    return SimpleNamespace(mesh=Mesh(np.array(jax.devices("cpu")), ("x",)), put=jax.device_put)
