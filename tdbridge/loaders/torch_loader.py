"""What has to be known of a torch DataLoader, a torchdata one included."""

import traceback
import warnings
from collections.abc import Iterator
from typing import Any

from tensordict import is_tensor_collection
from torch.utils.data import DataLoader, default_collate

from tdbridge.loaders.collate import collate
from tdbridge.loaders.rows import Rows
from tdbridge.loaders.workers import WithoutJax


def adapt(loader: DataLoader[Any]) -> None:
    """Makes a DataLoader safe to load from; warns of what its user would want to know.

    Its workers refuse to use JAX, in which they would hang. A stateful loader over a bare
    TensorDict would take the data for a part of its own state: it gets `Rows` over them.
    """
    if loader.num_workers and not isinstance(loader.worker_init_fn, WithoutJax):
        loader.worker_init_fn = WithoutJax(loader.worker_init_fn)
    if is_tensor_collection(loader.dataset) and hasattr(loader, "state_dict"):
        warnings.warn(
            f"a {type(loader).__name__} over a TensorDict saves the data in its own state, and "
            "hangs when they are memory-mapped and it has workers. It goes over "
            "tdbridge.loaders.Rows(td) now: pass that as its dataset.",
            stacklevel=4,
        )
        # A DataLoader wants its samplers made for the dataset: of these, the length is the same.
        object.__setattr__(loader, "dataset", Rows(loader.dataset))
        if loader.collate_fn is default_collate:
            loader.collate_fn = collate
    if loader.pin_memory:
        warnings.warn(
            "the DataLoader pins each batch anew (pin_memory=True), in a thread of its own. Leave "
            "it out: tdbridge.loaders.Loader copies batches through pinned buffers that it uses "
            "again, where there is a device to copy to.",
            stacklevel=4,
        )


def batches_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """One epoch. Its workers end with it, and after an error too."""
    batches = iter(loader)
    return _from_workers(batches) if loader.num_workers else batches


def _from_workers(batches: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from batches
    except Exception as error:
        if isinstance(error, (ConnectionError, EOFError)):
            error.add_note("A worker of the DataLoader ended with batches that were not read yet.")
        # The frames of the DataLoader hold its iterator, and with that the workers. What is of
        # interest happened in another process, and is in the message.
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        del batches  # this frame would hold it too
