"""The loaders of others over the same rows, each as its own documentation has it.

A loader is anything whose iteration is an epoch, and whose batches are jax arrays by key or in the
order of the keys. Workers are started once, and stay.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any

import grain
import jax
import numpy as np
import torch
from absl import flags
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset, default_collate

HAS_JAX_DATALOADER = find_spec("jax_dataloader") is not None
BATCH = 128

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Epochs:
    """What calls `begin` for each epoch."""

    begin: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


class ArrayRows(Dataset[Arrays]):
    """The rows of NumPy arrays one by one, as a dataset of torch and as a source of Grain."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, index: Any) -> Arrays:
        return {key: array[index] for key, array in self._arrays.items()}

    def __repr__(self) -> str:
        return f"ArrayRows({len(self)})"


def of_torch(dataset: Any, workers: int, **options: Any) -> DataLoader[Any]:
    """A DataLoader with what all contenders have in common."""
    return DataLoader(
        dataset,
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator().manual_seed(0),
        **options,
    )


def recipe(arrays: Arrays, workers: int) -> Iterable[Any]:
    """That of JAX's tutorial "Training a simple neural network, with PyTorch data loading"."""
    loader = of_torch(ArrayRows(arrays), workers, collate_fn=numpy_collate)
    return Epochs(lambda: map(jax.device_put, loader))


def numpy_collate(batch: Any) -> Any:
    return jax.tree.map(np.asarray, default_collate(batch))


def tensordict(td: TensorDict, workers: int) -> Iterable[Any]:
    """A batch is `td[indices]`, as TensorDict has it for a DataLoader; each leaf is shared."""
    loader = of_torch(td, workers, collate_fn=same)
    return Epochs(lambda: map(leaf_by_leaf, loader))


def same(batch: Any) -> Any:
    return batch


def leaf_by_leaf(batch: TensorDict) -> Any:
    return jax.tree.map(jax.dlpack.from_dlpack, batch.to_dict())


def of_grain(arrays: Arrays, workers: int) -> Iterable[Any]:
    """Without threads to read, as Grain has it for data in memory, and with its `device_put`."""
    rows = grain.MapDataset.source(ArrayRows(arrays)).shuffle(seed=0)
    if workers:
        return _endless_grain(rows, workers)
    return _on_device(rows.batch(BATCH).to_iter_dataset(_IN_MEMORY))


_IN_MEMORY = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def _endless_grain(rows: Any, workers: int) -> Iterable[Any]:
    """Its workers end with an iterator, so the epochs are cut out of one that does not end.

    What it holds ready, eight batches, was made before an epoch begins.
    """
    if not flags.FLAGS.is_parsed():  # Grain reads one when it starts workers
        flags.FLAGS.mark_as_parsed()
    dataset = rows.repeat().batch(BATCH).to_iter_dataset(_IN_MEMORY)
    options = grain.MultiprocessingOptions(num_workers=workers)
    endless = _closed_at_end(_on_device(dataset.mp_prefetch(options)))
    return Epochs(lambda: islice(endless, len(rows) // BATCH))


def _closed_at_end(dataset: Any) -> Iterator[Any]:
    with closing(iter(dataset)) as batches:
        yield from batches


def _on_device(dataset: Any) -> Any:
    return grain.experimental.device_put(dataset, jax.devices()[0])


def jax_dataloader(arrays: Arrays, workers: int) -> Iterable[Any]:
    """Its backend "jax" knows no workers; "pytorch" does. Neither gives jax arrays."""
    import jax_dataloader as jdl

    values: Any = arrays.values()  # it says jax arrays, and makes numpy arrays of them
    dataset = jdl.ArrayDataset(*values)
    options: dict[str, Any] = {"backend": "jax"}
    if workers:
        options = {"backend": "pytorch", "num_workers": workers, "persistent_workers": True}
    loader = jdl.DataLoader(dataset, batch_size=BATCH, shuffle=True, **options)
    return Epochs(lambda: map(jax.device_put, loader))
