"""JAX in a worker is an error that arrives in the main process, and never a hang."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch.utils.data import DataLoader

from tdbridge import WorkerError
from tdbridge.loaders import collate, forbid_jax
from tests.loaders.datasets import (
    Calls,
    Offends,
    OffendsLater,
    UsesTrees,
    offending_collate,
)

pytestmark = pytest.mark.filterwarnings(
    # pytest's process has threads of JAX, which a forked worker does not use.
    "ignore:os.fork\\(\\) was called:RuntimeWarning"
)

MESSAGE = (
    r"JAX was used in DataLoader worker 0 \(operation '\w+'\), where it would hang or start a "
    r"backend of its own. Make torch or numpy data there, and convert in the main process"
)


def load(dataset: Any, context: str, **more: Any) -> list[Any]:
    """All batches; a worker that hangs is an error, and the backend runs before a fork."""
    assert jnp.ones(1).sum() == 1
    loader = DataLoader(
        dataset, batch_size=2, num_workers=1, timeout=120, multiprocessing_context=context, **more
    )
    return list(loader)


@pytest.mark.parametrize(
    ("where", "context"),
    [("dataset", "fork"), ("transform", "fork"), ("collate", "fork"), ("dataset", "spawn")],
)
def test_an_offender_is_an_error(context, where):
    function = offending_collate if where == "collate" else collate
    with pytest.raises(WorkerError, match=MESSAGE) as caught:
        load(Offends(where), context, collate_fn=function, worker_init_fn=forbid_jax)
    name = {"dataset": "__getitem__", "transform": "double", "collate": "offending_collate"}[where]
    assert f"in {name}\n" in str(caught.value)  # the traceback of the worker


def test_collate_forbids_it_from_its_first_call_on():
    with pytest.raises(WorkerError, match=MESSAGE):
        load(OffendsLater("nowhere"), "fork", collate_fn=collate)


def test_a_function_compiled_before_the_fork_is_no_way_around():
    jitted = jax.jit(jnp.sin)
    jitted(np.arange(3, dtype=np.float32))
    with pytest.raises(WorkerError, match=MESSAGE):
        load(Calls(jitted), "fork", collate_fn=collate, worker_init_fn=forbid_jax)


def test_pytrees_and_views_of_arrays_are_no_use_of_a_backend():
    held = jnp.arange(3)
    (batch,) = load(UsesTrees(held), "fork", collate_fn=collate, worker_init_fn=forbid_jax)
    assert batch["x"].tolist() == [[0, 1, 2], [1, 2, 3]]


def test_the_main_process_computes_on():
    load(Offends("nowhere"), "fork", collate_fn=collate, worker_init_fn=forbid_jax)
    collate([1, 2])
    assert jax.jit(lambda x: x + 1)(jnp.ones(2)).tolist() == [2.0, 2.0]


FORBIDDEN = """
import jax, jax.numpy as jnp, numpy as np
from tdbridge import WorkerError
from tdbridge.loaders import forbid_jax
held = jnp.arange(4.0)
jitted = jax.jit(lambda x: x * 2)
jitted(held)
uses = dict(
    ones=lambda: jnp.ones(3), jitted=lambda: jitted(held), add=lambda: held + 1,
    item=lambda: held[2], part=lambda: held[1:], array=lambda: jnp.array([1, 2]),
    asarray=lambda: jnp.asarray(np.ones(3)), key=lambda: jax.random.key(0),
    vmap=lambda: jax.vmap(lambda x: x + 1)(held), grad=lambda: jax.grad(lambda x: x * x)(1.0),
    scan=lambda: jax.lax.scan(lambda c, x: (c + x, x), 0.0, held), sum=lambda: held.sum(),
)
forbid_jax()
forbid_jax(3)
for name, use in uses.items():
    try:
        use()
    except WorkerError as error:
        assert "JAX was used in a worker process (operation" in str(error), error
    else:
        print(name)
"""


def test_each_kind_of_use_raises():
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN],
        check=False, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
