"""The trees that every test file runs over, and what is in them, worked out with numpy.

`TREES` maps a name to a function that builds a fresh TensorDict or tensorclass. Every leaf is
filled with a known pattern, so `expected(name)` needs no code of tdbridge. `KINDS` has the trees
that are more than dicts of tensors of one batch; `described` says what one is.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    is_non_tensor,
    is_tensor_collection,
    lazy_stack,
)

BOTH = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 "
    "complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()
"""The dtypes that torch and JAX both have."""


class Step(TensorClass):
    """A tensorclass with a tensor, a non-tensor field, one that may be None, and a nested one."""

    obs: torch.Tensor
    label: str
    weight: torch.Tensor | None = None
    after: "Step | None" = None


class Batch(TensorDict):
    """A plain subclass of TensorDict."""


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The values of a tensor as numpy, bf16 and float8 included, by way of its bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    name = str(plain.dtype).removeprefix("torch.")
    if plain.numel() == 0:
        return np.zeros(tuple(plain.shape), numpy_dtype(name))
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.frombuffer(raw, numpy_dtype(name)).reshape(tuple(plain.shape))


def pattern(name: str, *shape: int) -> torch.Tensor:
    """A tensor of dtype `name`, its elements the bytes 1, 2, 3, ... (bool: alternating)."""
    dtype = getattr(torch, name)
    count = int(np.prod(shape))
    if name == "bool":
        return (torch.arange(count) % 2 == 0).reshape(shape)
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.arange(count, dtype=torch.float32) % 4 + 1  # exact in every float8
        return values.to(dtype).reshape(shape)
    return torch.from_numpy(np.arange(count).astype(name)).reshape(shape)


def flat() -> TensorDict:
    return TensorDict({"b": pattern("float32", 4, 3), "a": pattern("int32", 4)}, [4])


def nested() -> TensorDict:
    return TensorDict(
        {
            "obs": pattern("float32", 4, 3),
            "next": {"reward": pattern("float32", 4), "done": pattern("bool", 4, 1)},
            "deep": {"er": {"est": pattern("int16", 4, 2)}},
        },
        [4],
        names=["time"],
    )


def deeper_batch() -> TensorDict:
    inner = TensorDict({"x": pattern("float32", 2, 5, 3)}, [2, 5], names=[None, "step"])  # pyright: ignore[reportArgumentType]
    return TensorDict({"y": pattern("float32", 2), "inner": inner}, [2])


def empty() -> TensorDict:
    return TensorDict({}, [3])


def empty_inside() -> TensorDict:
    return TensorDict({"x": pattern("float32", 3), "e": {}, "n": {"e": {"e": {}}}}, [3])


def no_batch() -> TensorDict:
    return TensorDict({"w": pattern("float32", 3, 2), "step": torch.tensor(7, dtype=torch.int32)})


def zero_batch() -> TensorDict:
    return TensorDict({"x": pattern("float32", 0, 3), "n": {"y": pattern("int8", 0)}}, [0])


def zero_size() -> TensorDict:
    return TensorDict({"x": pattern("float32", 2, 0), "y": pattern("float32", 2)}, [2])


def non_tensors() -> TensorDict:
    td = TensorDict({"x": pattern("float32", 2), "s": "text", "n": {"y": pattern("int8", 2)}}, [2])
    td["d"] = NonTensorData({"k": [1, 2.5, None], "t": (1, "u")}, batch_size=[2])
    td["n", "array"] = NonTensorData(np.arange(3), batch_size=[2])
    return td


def tensorclass() -> Step:
    after = Step(obs=pattern("float32", 2, 3), label="after", batch_size=[2])
    return Step(obs=pattern("float32", 2, 3) + 4, label="now", after=after, batch_size=[2])


def tensorclass_inside() -> TensorDict:
    return TensorDict({"x": pattern("int32", 2), "step": tensorclass()}, [2])


def subclass() -> Batch:
    return Batch({"x": pattern("float32", 2, 2), "n": Batch({"y": pattern("int8", 2)}, [2])}, [2])


def all_dtypes() -> TensorDict:
    return TensorDict({name: pattern(name, 3, 5) for name in BOTH}, [3])


def narrow_dtypes() -> TensorDict:
    """All that JAX keeps while x64 is off."""
    wide = ("int64", "uint64", "float64", "complex128")
    return TensorDict({name: pattern(name, 3, 5) for name in BOTH if name not in wide}, [3])


def strided() -> TensorDict:
    """Leaves that are not one C-contiguous block, and values that are not what memory holds."""
    base = pattern("float32", 4, 6)
    z = torch.complex(pattern("float32", 4), pattern("float32", 4) + 1)
    return TensorDict(
        {
            "transposed": pattern("float32", 6, 4).t(),
            "channels_last": pattern("float32", 4, 3, 2, 2).to(memory_format=torch.channels_last),
            "columns": base[:, 1:3],
            "step": base[:, ::2],
            "expanded": pattern("float32", 4, 1).expand(4, 3),
            "unaligned": pattern("float32", 9)[5:],
            "scalar": pattern("float32", 4)[:, None].squeeze(-1),
            "conj": z.conj(),
            "neg": z.conj().imag,
        },
        [4],
    )


def odd_keys() -> TensorDict:
    keys = ["", "a.b", "a/b", "leaves_", "ключ", "cls_", "non_tensor", "0"]
    return TensorDict({key: pattern("float32", 2) + i for i, key in enumerate(keys)}, [2])


def reserved_keys() -> TensorDict:
    """Keys that stock consolidated metadata uses itself."""
    keys = ["size", "cls", "leaves", "non_tensors", "cls_metadata"]
    return TensorDict({k: {"x": pattern("float32", 2) + i} for i, k in enumerate(keys)}, [2])


def with_device() -> TensorDict:
    return TensorDict(
        {"x": pattern("float32", 2), "n": {"y": pattern("int8", 2)}}, [2], device="cpu"
    )


def many() -> TensorDict:
    return TensorDict({f"leaf{i:03d}": pattern("float32", 16) + i for i in range(200)}, [])


TREES: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (
        flat, nested, deeper_batch, empty, empty_inside, no_batch, zero_batch, zero_size,
        non_tensors, tensorclass, tensorclass_inside, subclass, narrow_dtypes, all_dtypes, strided,
        odd_keys, reserved_keys, with_device, many,
    )
}  # fmt: skip

X64_ONLY = {"all_dtypes"}
"""Trees with leaves that JAX keeps exact only while x64 is on."""


def leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], torch.Tensor]:
    """The tensors of a TensorDict or tensorclass by path, read with its public API."""
    found: dict[tuple[str, ...], torch.Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, torch.Tensor):
            found[(*path, key)] = value
        elif not isinstance(value, NonTensorData):
            found.update(leaves(value, (*path, key)))
    return found


def expected(name: str) -> dict[tuple[str, ...], np.ndarray]:
    """The values of a tree, by path."""
    return {path: as_numpy(tensor) for path, tensor in leaves(TREES[name]()).items()}


def nodes(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The TensorDicts and tensorclasses of a tree by path, the root included."""
    found = {path: tree}
    for key, value in tree.items():
        if not isinstance(value, (torch.Tensor, NonTensorData)):
            found.update(nodes(value, (*path, key)))
    return found


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in dtype, shape and every bit: NaN payloads and the sign of zero count."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def nested_too() -> TensorDict:
    td = nested()
    return td.set("obs", td["obs"] + 4)


def lazy() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(nested(), nested_too())


def lazy_named() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(nested(), nested_too(), stack_dim=1, stack_dim_name="row")


def lazy_unequal() -> LazyStackedTensorDict:
    """Members of other batch sizes, with other keys and other non-tensor values."""
    a = TensorDict({"x": pattern("float32", 2, 3), "s": "one"}, [2])
    b = TensorDict({"x": pattern("float32", 3, 3), "y": pattern("int8", 3), "s": "two"}, [3])
    return LazyStackedTensorDict(a, b)


def lazy_of_lazy() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(lazy(), lazy(), stack_dim=2)


def lazy_leafless() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(TensorDict({}, [3]), TensorDict({}, [3]), stack_dim=1)


def lazy_of_tensorclasses() -> Any:
    return lazy_stack([tensorclass(), tensorclass()], 1)


def lazy_inside() -> TensorDict:
    return TensorDict({"x": pattern("float32", 4), "rows": lazy_named()}, [4])


def values_per_element() -> TensorDict:
    """One value each, of types that have no hash among them."""
    values = [[1, 2], {"k": 1}, np.arange(3), None]
    stack = NonTensorStack(*[NonTensorData(value) for value in values])
    return TensorDict({"x": pattern("float32", 4), "n": {"v": stack}}, [4])


def values_in_two_dims() -> TensorDict:
    columns = [NonTensorStack("a", "b"), NonTensorStack("c", "d"), NonTensorStack("e", "f")]
    stack = NonTensorStack(*columns, stack_dim=1)
    return TensorDict({"x": pattern("float32", 2, 3), "v": stack}, [2, 3])


def unbatched() -> TensorDict:
    inner = TensorDict({"u": UnbatchedTensor(pattern("int8", 2, 2)), "y": pattern("int8", 4)}, [4])
    return TensorDict(
        {"u": UnbatchedTensor(pattern("float32", 5)), "x": pattern("float32", 4), "n": inner}, [4]
    )


def params() -> TensorDictParams:
    td = TensorDict({"w": pattern("float32", 2, 3), "n": {"b": pattern("float32", 3)}, "s": "text"})
    return TensorDictParams(td)


def params_inside() -> TensorDict:
    return TensorDict({"x": pattern("float32", 1), "p": params()})


def module() -> TensorDict:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    return TensorDict.from_module(net).apply(lambda p: pattern("float32", *p.shape))


def jagged() -> TensorDict:
    rows = [pattern("float32", 2, 3), pattern("float32", 4, 3)]
    return TensorDict(
        {"j": torch.nested.nested_tensor(rows, layout=torch.jagged), "x": pattern("int8", 2)}, [2]
    )


def jagged_transposed() -> TensorDict:
    td = jagged()
    return TensorDict({"n": {"j": td["j"].transpose(1, 2)}}, [2])


def jagged_with_gaps() -> TensorDict:
    start, length = torch.tensor([0, 1]), torch.tensor([3, 4])
    narrow: Any = torch.nested.narrow
    rows = narrow(pattern("float32", 2, 10), 1, start, length, layout=torch.jagged)
    return TensorDict({"j": rows}, [2])


def lazy_of_jagged() -> LazyStackedTensorDict:
    return LazyStackedTensorDict(jagged(), jagged_with_gaps())


KINDS: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (
        lazy, lazy_named, lazy_unequal, lazy_of_lazy, lazy_leafless, lazy_of_tensorclasses,
        lazy_inside, values_per_element, values_in_two_dims, unbatched, params, params_inside,
        module, jagged, jagged_transposed, jagged_with_gaps, lazy_of_jagged,
    )
}  # fmt: skip


def described(tree: Any) -> Any:
    """What a tree of any kind is, as plain data that can be compared; read by public API alone."""
    if is_non_tensor(tree):
        return type(tree).__name__, tuple(tree.batch_size), repr(tree.tolist())
    if not is_tensor_collection(tree):
        return described_leaf(tree)
    what = type(tree), tuple(tree.batch_size), tree.names
    if isinstance(tree, LazyStackedTensorDict):
        return *what, tree.stack_dim, [described(member) for member in tree.tensordicts]
    return *what, {key: described(tree.get(key)) for key in sorted(tree.keys())}


def described_leaf(leaf: Any) -> Any:
    """Its bits; a jagged tensor has them in rows, and an unbatched one has a batch size too."""
    if leaf is None or isinstance(leaf, (str, list)):  # the fields of a tensorclass
        return repr(leaf)
    if leaf.is_nested:
        ragged = [type(size) is int for size in leaf.shape]
        return ragged, leaf.offsets().dtype, [described_leaf(row) for row in leaf.unbind()]
    size = tuple(leaf.batch_size) if isinstance(leaf, UnbatchedTensor) else None
    values = as_numpy(leaf)
    return size, values.dtype, values.shape, values.tobytes()
