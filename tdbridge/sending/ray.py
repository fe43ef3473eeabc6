"""Ray: trees consolidated on the way, and read where they lie in the object store."""

from typing import Any

from tensordict import LazyStackedTensorDict, TensorDict

from tdbridge._compat.tensordict import defined_classes
from tdbridge.errors import LayoutError, LeafTypeError
from tdbridge.layout.buffer import consolidate
from tdbridge.pytrees.arraydict import ArrayDict
from tdbridge.pytrees.packed import PackedArrayDict
from tdbridge.sending.arraydicts import reduce_arraydict
from tdbridge.sending.packed import reduce_packed
from tdbridge.sending.partial import plain_leaves
from tdbridge.sending.tensordicts import sent

_registered: set[type] = set()


def register_ray() -> None:
    """Makes trees go through Ray as one buffer each, which is not copied where it is read.

    It holds for `ray.put`, `ray.get`, and the arguments and results of tasks and actors. A
    TensorDict, a subclass of it or a tensorclass arrives consolidated and locked, an ArrayDict as
    ArrayDict. Trees that `tdbridge.consolidate` would change or does not take (with parameters,
    gradients, jagged or sparse tensors, on an accelerator) go as they do without it.

    What is read lies in the object store, in memory that every process of the node maps. jax arrays
    are read-only anyway, and numpy arrays in an ArrayDict are so here. A tensor is not: **an
    in-place write to it changes the object for everybody who has it or gets it**, without an error,
    and the lock does not prevent it. Write to `td.clone()`.

    Call it once in the process that starts Ray, before or after `ray.init`. A worker process is
    registered by the first tree that it gets. One that sends before it gets any needs a call of
    its own: in the constructor of the actor, or for all workers by
    `ray.init(runtime_env={"worker_process_setup_hook": tdbridge.sending.register_ray})`. Without
    it nothing breaks: a consolidated tree goes as one buffer all the same, and is copied where it
    is read. Calling it again does no harm, and registers subclasses of TensorDict that were defined
    since.

    Raises:
        ImportError: Ray is not installed.

    Example:
        >>> import torch
        >>> from ray import cloudpickle  # what `ray.put` and `ray.get` pickle with
        >>> from tensordict import TensorDict
        >>> register_ray()
        >>> message = cloudpickle.dumps(TensorDict(x=torch.ones(3)))
        >>> cloudpickle.loads(message).is_consolidated()
        True
    """
    from ray.util import register_serializer

    subclasses = [cls for cls in defined_classes() if issubclass(cls, TensorDict)]
    for cls in (TensorDict, LazyStackedTensorDict, ArrayDict, PackedArrayDict, *subclasses):
        if cls not in _registered:
            register_serializer(cls, serializer=_departing, deserializer=_arrived)
            _registered.add(cls)


class _Departing:
    """Stands for a tree in a pickle, and has its reduction."""

    def __init__(self, reduction: Any) -> None:
        self.reduction = reduction

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.reduction


def _departing(tree: Any) -> _Departing:
    return _Departing(_reduction(tree))


def _reduction(tree: Any) -> Any:
    if isinstance(tree, PackedArrayDict):  # read where it lies anyway
        return reduce_packed(tree)
    if isinstance(tree, ArrayDict):
        return reduce_arraydict(tree, in_place=True)
    found = sent(tree, in_place=True)
    if found is None and plain_leaves(tree) is not None:
        try:
            found = sent(consolidate(tree), in_place=True)
        except (LeafTypeError, LayoutError):  # dtypes and classes that we do not know
            found = None
    return tree.__reduce_ex__(5) if found is None else found


def _arrived(tree: Any) -> Any:
    """The tree; the process that got it sends its own in the same way from now on."""
    if not _registered:
        register_ray()
    return tree
