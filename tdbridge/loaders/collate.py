"""Samples -> one batch in one buffer."""

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDict, is_non_tensor, is_tensor_collection
from torch.utils.data import get_worker_info

from tdbridge.convert.records import fields_of, is_record, with_fields
from tdbridge.errors import LayoutError, LeafTypeError
from tdbridge.layout.non_tensors import elements_of, value_of
from tdbridge.layout.spec import Path
from tdbridge.layout.tree import is_node
from tdbridge.loaders.batches import consolidated, stacked
from tdbridge.loaders.columns import described, difference, packed_columns
from tdbridge.loaders.samples import NoColumns, batched
from tdbridge.loaders.workers import forbid_jax


def collate(samples: Any) -> Any:
    """Packs samples into one batch, all leaves in one aligned buffer.

    It goes to `torch.utils.data.DataLoader(collate_fn=collate)` and to Grain's
    `batch(n, batch_fn=collate)`. In a worker the buffer is shared memory from the start: the batch
    crosses to the main process as one storage and its metadata, without a copy, and there
    `to_jax(batch)` shares the memory with JAX. `collate` can be pickled by name, under fork, spawn
    and forkserver.

    Each sample is copied once; nothing is cast, and gradients are not carried.

    ============================================  ==================================================
    sample                                        batch of n
    ============================================  ==================================================
    TensorDict, tensorclass of batch size ``b``   the same class, batch size ``(n, *b)``
    mapping with string keys, nested too          TensorDict of batch size ``(n,)``
    tuple, list, namedtuple, dataclass            the same container, of views of one buffer
    tensor, numpy array or scalar of shape ``s``  tensor of shape ``(n, *s)``, the same dtype
    bool, int, float, complex                     ``(n,)``: bool, int64, torch's default dtypes
    other value of a TensorDict or mapping        non-tensor data: one value, or one per sample
    other value of a container, or by itself      the list of the n values
    ============================================  ==================================================

    Lazy stacks and jagged tensors are stacked as stock does, and then copied to the buffer.

    Args:
        samples: a list of samples of one structure; or a batch that `dataset.__getitems__` made:
            a TensorDict or a tensorclass, which is consolidated, or returned itself if it is.

    Returns:
        The batch. A TensorDict or a tensorclass is consolidated and locked as a result of
        `tdbridge.consolidate` is.

    Raises:
        LayoutError: there are no samples, or they differ: in keys, kinds, dtypes, shapes, batch
            sizes. The error names the leaf and the sample.
        LeafTypeError: a sample holds what a batch cannot: a jax array, tensors in a list in a
            dict, sparse tensors, ...

    Example:
        >>> import numpy as np
        >>> batch = collate([{"x": np.full(2, i), "label": i} for i in range(3)])
        >>> batch["x"].shape, batch["label"].tolist(), batch.is_consolidated()
        (torch.Size([3, 2]), [0, 1, 2], True)
    """
    if get_worker_info() is not None:
        forbid_jax()
    if is_node(samples) and is_tensor_collection(samples):
        return consolidated(samples)
    if not isinstance(samples, (list, tuple)):
        raise LeafTypeError(
            f"got {described(samples)}: expected a list of samples, or a batch that is a "
            "TensorDict or a tensorclass."
        )
    if not samples:
        raise LayoutError("got no samples, of which no batch can be made.")
    return _batch_of(samples)


def _batch_of(samples: Sequence[Any]) -> Any:
    first = samples[0]
    if is_node(first) or isinstance(first, Mapping):
        return _tree_of(samples)
    named = [{_ITEM: sample} for sample in _opened(samples, ())]
    return _closed(first, _tree_of(named), _ITEM)


_ITEM = "sample"


def _tree_of(samples: Sequence[Any]) -> Any:
    try:
        return packed_columns(batched(samples))
    except NoColumns:
        whole = [s if is_node(s) else TensorDict(s, batch_size=[]) for s in samples]
        return stacked(whole)


def _opened(samples: Sequence[Any], path: Path) -> Sequence[Any]:
    """Containers as mappings of their parts, and the containers in them; anything else as it is."""
    parts = _parts(samples[0])
    if parts is None:
        return samples
    if len({*map(type, samples)}) > 1:
        raise difference(path, samples)
    rows = [found for sample in samples if (found := _parts(sample)) is not None]
    if any(row.keys() != parts.keys() for row in rows):
        raise difference(path, samples)
    columns = [_opened([row[key] for row in rows], (*path, key)) for key in parts]
    return [
        {key: column[i] for key, column in zip(parts, columns, strict=True)}
        for i, _ in enumerate(rows)
    ]


def _parts(sample: Any) -> dict[str, Any] | None:
    if isinstance(sample, (list, tuple)):
        return {str(i): part for i, part in enumerate(sample)}
    return fields_of(sample) if is_record(type(sample)) else None


def _closed(first: Any, batch: Any, key: str) -> Any:
    """The container that `first` is, of the parts of a batch."""
    entry = batch.get(key)
    parts = _parts(first)
    if parts is None:
        if is_non_tensor(entry):
            return list(elements_of(value_of(entry), batch.batch_size))
        return entry
    whole = {name: _closed(part, entry, name) for name, part in parts.items()}
    if is_record(type(first)):
        return with_fields(first, whole)
    if hasattr(first, "_fields"):
        return type(first)(*whole.values())
    return type(first)(whole.values())
