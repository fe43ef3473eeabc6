"""What the ranks do in several tests."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests import zoo


@cache
def mesh_of(*shape: int) -> DeviceMesh:
    """One mesh per shape and process: making one is collective. Axes `a`, `b`, `c`."""
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))


def distributed(
    mesh_shape: Sequence[int], placements: Sequence[Placement], shape: Sequence[int], name: str
) -> DTensor:
    """`zoo.pattern(name, *shape)` over the ranks, cut by torch."""
    whole = zoo.pattern(name, *shape)
    # Each rank cuts its own copy: gloo sends no float8.
    return distribute_tensor(whole, mesh_of(*mesh_shape), placements, src_data_rank=None)


def box_of(dtensor: DTensor) -> tuple[slice, ...]:
    """Where this rank's shard lies in the whole, computed by torch."""
    sizes, offsets = compute_local_shape_and_global_offset(
        dtensor.shape, dtensor.device_mesh, dtensor.placements
    )
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def only_shard(array: Any) -> Any:
    """The one shard of a global array that this process has."""
    (shard,) = array.addressable_shards
    return shard


def raised(function: Any, *args: Any, **kwargs: Any) -> str:
    """The class and the text of the error of a call; empty when it raises none."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test compares it
        return f"{type(error).__name__}: {error}"
    return ""
