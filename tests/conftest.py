"""What holds in every test. Environment variables also reach the processes that tests start."""

import os

# In front, because the last one of a flag wins: a value from outside stays in force.
os.environ["XLA_FLAGS"] = " ".join(
    ["--xla_force_host_platform_device_count=8", os.environ.get("XLA_FLAGS", "")]
)
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with a GPU: JAX_PLATFORMS=cuda,cpu make test

import hypothesis
import jax
import pytest
import torch

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Under xdist every worker would start a thread for each core.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# The first example pays for imports and compilation, so neither time limit means anything.
hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# Other examples on each run: HYPOTHESIS_PROFILE=explore make test
hypothesis.settings.register_profile(
    "explore", hypothesis.settings.get_profile("ci"), derandomize=False, max_examples=1000
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
