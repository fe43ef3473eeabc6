"""Warm pools of processes, started when first asked for and shared by all tests of the folder."""

from collections.abc import Iterator

import pytest

from tests.multiprocess.pool import Pool


@pytest.fixture(scope="session")
def two() -> Iterator[Pool]:
    """Two ranks, JAX beside torch.distributed."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    """Four ranks, JAX beside torch.distributed."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def torch_alone() -> Iterator[Pool]:
    """Two fresh ranks of torch.distributed, where JAX knows of no other process."""
    pool = Pool(2, with_jax=False)
    yield pool
    pool.close()
