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


@pytest.fixture(scope="session")
def three() -> Iterator[Pool]:
    """Three ranks of torch.distributed: an odd number, and no power of two."""
    pool = Pool(3, with_jax=False)
    yield pool
    pool.close()


@pytest.fixture(params=["two", "three", "four"])
def each(request: pytest.FixtureRequest) -> Pool:
    """A test that asks for it runs on two, three and four ranks."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def torch_alone() -> Iterator[Pool]:
    """Two fresh ranks of torch.distributed, where JAX knows of no other process."""
    pool = Pool(2, with_jax=False)
    yield pool
    pool.close()
