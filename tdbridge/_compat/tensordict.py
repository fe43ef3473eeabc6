"""tensordict: nodes built without validation, the consolidated slot, and new classes.

* A TensorDict that holds tracers, masks or `None` can only be built by `_new_unsafe`; every
  public constructor validates its values.
* `is_consolidated()` and the pickling of a consolidated tensordict read the `_consolidated` slot.
* A tensorclass is announced to torch's pytrees by one function when it is defined; that is the
  moment to register it in JAX and optree too.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import tensordict
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_tensorclass

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
    base: Any = TensorDict if is_tensorclass(cls) else cls
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
    return cls.from_tensordict(td) if is_tensorclass(cls) else td


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
    return node._tensordict if is_tensorclass(type(node)) else node


def non_tensor(value: Any, batch_size: Sequence[int]) -> NonTensorData:
    """Wraps `value` as an entry of a tensordict of that batch size."""
    return NonTensorData(data=value, batch_size=torch.Size(batch_size))


def set_consolidated(td: Any, storage: torch.Tensor, metadata: dict[str, Any] | None) -> None:
    """Declares that the leaves of `td` are views of `storage`, as `metadata` describes."""
    tensordict_of(td)._consolidated = {"storage": storage, "metadata": metadata}


def consolidated_storage(td: Any) -> torch.Tensor | None:
    """The buffer that the leaves of `td` are views of, or None when it is not consolidated."""
    inner = tensordict_of(td)
    slot = getattr(inner, "_consolidated", None)
    return slot["storage"] if slot is not None and inner.is_consolidated() else None


def dtype_names() -> frozenset[str]:
    """The dtypes that stock consolidated metadata can name, as `str(torch.dtype)`."""
    from tensordict import utils

    return frozenset(getattr(utils, "_STR_DTYPE_TO_DTYPE", ()))


def defined_classes() -> list[type]:
    """The tensorclasses and the subclasses of TensorDict that are defined by now."""
    from tensordict import base

    known = [*getattr(base, "_ACCEPTED_CLASSES", ()), *_subclasses(TensorDict)]
    carried = [cls for cls in known if is_tensorclass(cls) or issubclass(cls, TensorDict)]
    # Non-tensor data is no node of a tree but an entry of one.
    return [cls for cls in carried if not getattr(cls, "_is_non_tensor", False)]


def _subclasses(cls: type) -> list[type]:
    direct = cls.__subclasses__()
    return [*direct, *(sub for child in direct for sub in _subclasses(child))]


def on_new_class(callback: Callable[[type], None]) -> bool:
    """Calls `callback(cls)` for each tensorclass and TensorDict subclass defined from now on.

    It is called while the class is being made: `is_tensorclass(cls)` may not be true yet.

    Returns False when tensordict has no such place any more; `tdbridge.register(cls)` then has
    to be called by hand.
    """
    hooked = False
    for name in ("tensordict.tensorclass", "tensordict.typedtensordict"):
        # Not `import a.b as c`: the attribute `tensordict.tensorclass` is the decorator.
        module: Any = importlib.import_module(name)
        original = getattr(module, "_register_td_node", None)
        if original is not None:
            module._register_td_node = _followed_by(original, callback)
            hooked = True
    if "__init_subclass__" not in TensorDictBase.__dict__:
        hook: Any = classmethod(_init_subclass(callback))
        TensorDictBase.__init_subclass__ = hook
    return hooked


def _followed_by(
    original: Callable[[type], None], callback: Callable[[type], None]
) -> Callable[[type], None]:
    @wraps(original)
    def register_node(cls: type) -> None:
        callback(cls)
        original(cls)

    return register_node


def _init_subclass(callback: Callable[[type], None]) -> Callable[..., None]:
    def init_subclass(cls: Any, **kwargs: Any) -> None:
        super(TensorDictBase, cls).__init_subclass__(**kwargs)
        callback(cls)

    return init_subclass
