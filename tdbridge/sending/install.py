"""Where pickle and the queues of multiprocessing look for the reductions of a class."""

import copyreg
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict

from tdbridge._compat.tensordict import pickle_by, queue_table
from tdbridge.layout.non_tensors import per_element
from tdbridge.pytrees.arraydict import ArrayDict
from tdbridge.pytrees.packed import PackedArrayDict
from tdbridge.sending import arraydicts, packed, tensordicts


def install() -> None:
    """Puts ours in front of stock's, which get what is in no buffer of ours."""
    pickle_by(tensordicts.reduce_tensordict)
    for cls in (TensorDict, LazyStackedTensorDict):
        stock = queue_table().get(cls, _by_itself)
        ForkingPickler.register(cls, tensordicts.queue_reduction(stock))
    copyreg.pickle(ArrayDict, arraydicts.reduce_arraydict)
    copyreg.pickle(PackedArrayDict, packed.reduce_packed)
    ForkingPickler.register(ArrayDict, arraydicts.forking_reduce_arraydict)
    ForkingPickler.register(PackedArrayDict, packed.forking_reduce_packed)
    torch.serialization.add_safe_globals(
        [arraydicts.rebuild_arraydict, packed.rebuild_packed, per_element]
    )


def _by_itself(tree: Any) -> Any:
    return tree.__reduce_ex__(4)
