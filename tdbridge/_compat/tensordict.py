"""tensordict: nodes built without validation, the consolidated slot, and new classes.

* A TensorDict that holds tracers, masks or `None` can only be built by `_new_unsafe`; every
  public constructor validates its values.
* `is_consolidated()` and the pickling of a consolidated tensordict read the `_consolidated` slot.
  Its metadata names dtypes by a table that lacks float8: the table is completed.
* Stock pickles a TensorDict by a function that is not told the protocol, and a subclass of it leaf
  by leaf, with the whole buffer each time: `pickle_by` replaces both.
* A tensorclass is announced to torch's pytrees by one function when it is defined; that is the
  moment to register it in JAX and optree too.
"""

import copyreg
import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import Any

import tensordict
import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    TensorDictParams,
    TypedTensorDict,
    is_tensorclass,
)

from tdbridge.errors import LeafTypeError

_HAS_NEW_UNSAFE = hasattr(TensorDict, "_new_unsafe")


def new_tensordict(
    cls: type,
    entries: Mapping[str, Any],
    *,
    batch_size: Sequence[int],
    names: Sequence[str | None] | None = None,
    device: torch.device | None = None,
) -> Any:
    """Builds one node of class `cls` (TensorDict, a subclass of it, or a tensorclass).

    `entries` are taken as they are: nothing is copied, moved or checked.
    """
    base: Any = cls if issubclass(cls, TensorDict) else TensorDict
    size = torch.Size(batch_size)
    if _HAS_NEW_UNSAFE:
        td = base._new_unsafe(
            dict(entries),
            batch_size=size,
            names=list(names) if names else None,
            device=device,
            nested=False,
        )
    else:
        td = _new_validated(base, entries, size, names, device)
    return td if base is cls else wrap(cls, td)


def wrap(cls: Any, td: Any) -> Any:
    """A tensorclass, a TypedTensorDict or parameters over `td`: a rebuild and no construction.

    `from_tensordict` runs `__post_init__` again, which may change the values, and converts fields.
    """
    if issubclass(cls, TensorDictParams):
        # The public constructor makes the tree anew, and of tensors alone.
        return (
            cls._new_unsafe(td, no_convert="skip") if _HAS_NEW_UNSAFE else cls(td, no_convert=True)
        )
    if issubclass(cls, TypedTensorDict):
        return cls.from_tensordict(td, check=False)
    new = cls.__new__(cls)
    if not _HAS_NEW_UNSAFE or not hasattr(cls, "_from_tensordict"):
        return cls.from_tensordict(td)
    new.__dict__.update(_tensordict=td, _non_tensordict={})
    return new


def _new_validated(
    cls: type,
    entries: Mapping[str, Any],
    batch_size: torch.Size,
    names: Sequence[str | None] | None,
    device: torch.device | None,
) -> TensorDict:
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor) and not tensordict.is_tensor_collection(value):
            raise LeafTypeError(
                f"{key!r}: this version of tensordict cannot hold a leaf that is no tensor, "
                f"got {type(value).__name__}. Use an ArrayDict instead."
            )
    td = cls(dict(entries), batch_size=batch_size, device=device)
    if names:
        td.names = list(names)
    return td


def tensordict_of(node: Any) -> TensorDictBase:
    """The TensorDict inside a tensorclass; any other node as it is."""
    inner = _inner(type(node))
    return node if inner is None else getattr(node, inner)


@cache
def _inner(cls: type) -> str | None:
    """The attribute that holds it: stock takes 1 us to tell a tensorclass, in each call."""
    if issubclass(cls, TypedTensorDict):
        return "_source"
    return "_tensordict" if is_tensorclass(cls) else None


_own_entries, _own_names = attrgetter("_tensordict"), attrgetter("_td_dim_names")


def entries_of(nodes: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The entries of each node by key, as they are stored, not to be written to.

    0.1 us a node instead of 2, which counts where each sample of a batch is one.
    """
    inner = _plain(nodes)
    try:
        if inner is not None:
            return list(map(_own_entries, inner))
    except AttributeError:
        pass
    return list(map(_copied_entries, nodes))


def _copied_entries(node: Any) -> dict[str, Any]:
    return dict(tensordict_of(node).items())


def all_unnamed(nodes: Sequence[Any]) -> bool:
    """Whether no dimension of any node has a name. False says nothing: ask each of them."""
    inner = _plain(nodes)
    try:
        return inner is not None and set(map(_own_names, inner)) == {None}
    except (AttributeError, TypeError):  # there are lists of names
        return False


def _plain(nodes: Sequence[Any]) -> Sequence[Any] | None:
    """The TensorDicts that the nodes are or hold; None when there are others."""
    if {*map(type, nodes)} != {TensorDict}:
        nodes = list(map(tensordict_of, nodes))
    return nodes if {*map(type, nodes)} == {TensorDict} else None


def set_consolidated(td: Any, storage: torch.Tensor, metadata: dict[str, Any]) -> None:
    """Declares that the leaves of `td` are views of `storage`, as `metadata` describes."""
    inner: Any = tensordict_of(td)
    _send_as_stock(type(inner))
    # In place where there is a slot: those of unpickled nested tensordicts point to it.
    slot = inner._consolidated = getattr(inner, "_consolidated", {})
    slot.update(storage=storage, metadata=metadata)


@cache
def _send_as_stock(cls: type) -> None:
    """Sends instances of a subclass of TensorDict through queues as TensorDict is sent."""
    table = queue_table()
    if not _has_own_reduction(cls) and cls not in table and TensorDict in table:
        ForkingPickler.register(cls, table[TensorDict])


def _has_own_reduction(cls: type) -> bool:
    """Whether a subclass says itself how it is pickled."""
    methods = cls.__reduce__, cls.__reduce_ex__
    return methods != (object.__reduce__, TensorDict.__reduce_ex__)


def queue_table() -> Mapping[type, Callable[[Any], Any]]:
    """By which function the queues of multiprocessing reduce instances of a class."""
    return ForkingPickler(io.BytesIO()).dispatch_table


Reduce = Callable[[Any], Any]
_PATCHED = (TensorDict, LazyStackedTensorDict)


def pickle_by(reduce: Callable[[Any, int, Reduce], Any]) -> None:
    """Pickles TensorDicts and subclasses of them, and lazy stacks, by `reduce`.

    Args:
        reduce: what gives a reduction, of the tree, the protocol, and the function that stock has
            for it.
    """
    for cls in _PATCHED:
        # An entry of the table would come first, and is not told the protocol.
        _patch(cls, copyreg.dispatch_table.pop(cls, None), reduce)


def _patch(cls: Any, stock: Reduce | None, reduce: Callable[[Any, int, Reduce], Any]) -> None:
    inherited = cls.__reduce_ex__

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        kind = type(self)
        if kind is not cls and (cls is LazyStackedTensorDict or _has_own_reduction(kind)):
            return inherited(self, protocol)

        def by_stock(td: Any) -> Any:
            if stock is not None and (kind is cls or consolidated_slot(td) is not None):
                return stock(td)
            return inherited(td, protocol)

        return reduce(self, protocol, by_stock)

    cls.__reduce_ex__ = __reduce_ex__


def consolidated_slot(td: Any) -> dict[str, Any] | None:
    """Stock's record of a consolidated tree, which others may write to; None when it is not one."""
    inner = tensordict_of(td)
    slot = getattr(inner, "_consolidated", None)
    return slot if slot is not None and inner.is_consolidated() else None


def consolidated_storage(td: Any) -> torch.Tensor | None:
    """The buffer that the leaves of `td` are views of, or None when it is not consolidated."""
    slot = consolidated_slot(td)
    return None if slot is None else slot["storage"]


def _complete_dtypes() -> frozenset[str]:
    from tensordict import utils

    table: dict[str, torch.dtype] = getattr(utils, "_STR_DTYPE_TO_DTYPE", {})
    before = frozenset(table)
    for dtype in vars(torch).values():
        if isinstance(dtype, torch.dtype):
            table.setdefault(str(dtype), dtype)
    return before


STOCK_DTYPES = _complete_dtypes()
"""What consolidated metadata can name where tdbridge is not imported, as `str(torch.dtype)`."""


def defined_classes() -> list[type]:
    """The tensorclasses and the subclasses of TensorDict that are defined by now."""
    from tensordict import base

    subclasses = [*_subclasses(TensorDict), *_subclasses(TypedTensorDict)]
    known = [*getattr(base, "_ACCEPTED_CLASSES", ()), *subclasses]
    carried = [cls for cls in known if is_tensorclass(cls) or cls in subclasses]
    return [cls for cls in carried if not is_non_tensor_class(cls)]


def is_non_tensor_class(cls: type) -> bool:
    """Whether instances are non-tensor data: no node of a tree but an entry of one."""
    return getattr(cls, "_is_non_tensor", False)


def _subclasses(cls: type) -> list[type]:
    direct = cls.__subclasses__()
    return [*direct, *(sub for child in direct for sub in _subclasses(child))]


def on_new_class(callback: Callable[[type], None]) -> bool:
    """Calls `callback(cls)` for each tensorclass and TensorDict subclass defined from now on.

    It is called while the class is being made: `is_tensorclass(cls)` may not be true yet.

    Returns False when tensordict has no such place any more; `tdbridge.register(cls)` then has
    to be called by hand.
    """
    # Not `import a.b as c`: the attribute `tensordict.tensorclass` is the decorator.
    module: Any = importlib.import_module("tensordict.tensorclass")
    original = getattr(module, "_register_td_node", None)
    if original is not None:
        module._register_td_node = _followed_by(original, callback)
    if "__init_subclass__" not in TensorDictBase.__dict__:
        hook: Any = classmethod(_init_subclass(callback))
        TensorDictBase.__init_subclass__ = hook
    return original is not None


def _followed_by(
    original: Callable[[type], None], callback: Callable[[type], None]
) -> Callable[[type], None]:
    @wraps(original)
    def register_node(cls: type) -> None:
        if not is_non_tensor_class(cls):
            callback(cls)
        original(cls)

    return register_node


def _init_subclass(callback: Callable[[type], None]) -> Callable[..., None]:
    def init_subclass(cls: Any, **kwargs: Any) -> None:
        super(TensorDictBase, cls).__init_subclass__(**kwargs)
        if issubclass(cls, (TensorDict, TypedTensorDict)):
            callback(cls)

    return init_subclass
