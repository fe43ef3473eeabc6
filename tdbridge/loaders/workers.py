"""JAX in a worker: an error instead of a hang.

XLA's threads do not survive a fork: in a forked worker the first operation that has to be
compiled waits for them for ever. A spawned worker would start a backend of its own, which on a GPU
takes most of its memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from torch.utils.data import get_worker_info

from tdbridge.errors import WorkerError


def forbid_jax(worker_id: int | None = None) -> None:
    """Makes JAX operations raise in this process from now on, so that none of them hangs.

    It goes to a stock `DataLoader(worker_init_fn=forbid_jax)`: what a dataset, a transform or a
    collate function then does with JAX arrives in the main process as a `WorkerError` with the
    worker's traceback. `collate` calls it too, but only after the first samples were made.

    Tracing (`jax.eval_shape`, `jax.make_jaxpr`) is forbidden with the rest. Pytree functions, numpy
    views of arrays, and arrays that are put in place without a computation are not: `collate`
    refuses these.

    Args:
        worker_id: what a DataLoader calls it with; not needed.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader([1, 2, 3], num_workers=2, worker_init_fn=forbid_jax)
    """
    primitives: Any = Primitive
    if primitives.bind is _refuse:
        return
    primitives.bind = _refuse
    # A function that was compiled before would not ask its operations. Under another value of a
    # setting that programs may depend on, it is traced anew, and does.
    now = jax.config.jax_random_seed_offset  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_random_seed_offset", now + 1)


@dataclass(frozen=True)
class WithoutJax:
    """A `worker_init_fn`: forbids JAX, and then calls another one.

    Attributes:
        then: the user's own, if there is one.
    """

    then: Callable[[int], Any] | None

    def __call__(self, worker_id: int) -> None:
        """Called by the worker."""
        forbid_jax()
        if self.then is not None:
            self.then(worker_id)


def _refuse(primitive: Primitive, *_args: Any, **_params: Any) -> NoReturn:
    info = get_worker_info()
    where = "a worker process" if info is None else f"DataLoader worker {info.id}"
    raise WorkerError(
        f"JAX was used in {where} (operation {primitive.name!r}), where it would hang or start a "
        "backend of its own. Make torch or numpy data there, and convert in the main process: "
        "tdbridge.loaders.Loader, or tdbridge.to_jax(batch)."
    )
