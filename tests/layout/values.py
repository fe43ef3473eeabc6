"""Non-tensor values as users store them, in pairs that differ and in pairs that are equal."""

import collections
import dataclasses
import enum
from typing import Any

import ml_dtypes
import numpy as np
import torch


class Mode(enum.Enum):
    TRAIN = 1
    EVAL = 2


@dataclasses.dataclass
class Config:
    name: str
    other: str = ""
    tags: Any = ()


# Each with a JSON form.
PLAIN: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        10**30,
        0.0,
        -0.0,
        1.0,
        float("nan"),
        float("inf"),
        -float("inf"),
    ),
    *(5e-324, 0.1, 1j, complex(float("nan"), -0.0), "", "1", "ключ", "a\0b", "\ud800", "!"),
    *(b"", b"1", (), (1,), (1, (2, "x")), [], [1], [[]], {}, {"a": 1}, {"a": 1, "b": [None]}),
    *({"!": "tuple"}, {1: "a"}, {True: "a"}, {None: 0, (1, 2): {"x"}}, set(), {1}, {"x", "y"}),
    *(
        frozenset(),
        frozenset({1}),
        torch.float32,
        torch.bfloat16,
        torch.Size([1, 2]),
        torch.Size([]),
    ),
    *(torch.device("cpu"), torch.device("cuda:1"), np.float32(1), np.int8(1), np.bool_(True)),
    *(np.str_("1"), np.datetime64("2020-01-01"), np.datetime64("NaT", "s"), np.timedelta64(1, "s")),
    *(ml_dtypes.bfloat16(1), np.arange(3), np.arange(3, dtype="int32"), np.arange(3).reshape(3, 1)),
    *(np.zeros(0), np.zeros((2, 0)), np.array(1.0), np.array("ab"), np.array([b"ab"])),
    *(np.array([0.0, np.nan]), np.array([-0.0, np.nan]), np.array([1, 2], "M8[D]")),
    *(torch.arange(3), torch.arange(3, dtype=torch.int32), torch.tensor(1.0), torch.zeros(2, 0)),
    *(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float8_e5m2)),
    *(torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.bool)),
]

# Each without one.
OPAQUE: list[Any] = [
    *(Mode.TRAIN, Mode.EVAL, Config("a"), Config("b"), Config("a", tags=[1]), range(3), range(4)),
    *(collections.OrderedDict(a=1), collections.deque([1]), slice(1, 2), Config, len, Mode),
    np.array([None, 1], dtype=object),
    np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
]


def build_equal() -> list[tuple[str, Any, Any]]:
    """Values that are equal in type and content but were made in other ways."""
    joined = str(b"abcd", "ascii")
    columns = np.asfortranarray(np.arange(6).reshape(2, 3))
    complex_ones = torch.ones(2, dtype=torch.complex64)
    return [
        ("order of a dict", {"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ("order of a set", {"a", "b", "c"}, {"c", "b", "a"}),
        ("nan", float("nan"), -float("nan")),
        ("strides", columns, np.ascontiguousarray(columns)),
        ("byte order", np.arange(3, dtype=">i4"), np.arange(3, dtype="<i4")),
        ("conjugate bit", complex_ones.conj(), complex_ones.conj().resolve_conj()),
        (
            "strides of a tensor",
            torch.arange(6).reshape(2, 3).t(),
            torch.tensor([[0, 3], [1, 4], [2, 5]]),
        ),
        ("gradient", torch.ones(2, requires_grad=True), torch.ones(2)),
        ("identity of strings", Config(joined, joined), Config(joined, str(b"abcd", "ascii"))),
        ("identity of lists", Config("a", tags=[[1], [1]]), Config("a", tags=[[1]] * 2)),
    ]


# Values whose pickle or iteration order changes with PYTHONHASHSEED, or with the process.
UNSTABLE: list[Any] = [
    {"red", "green", "blue", "black"},
    frozenset({"red", "green", "blue", "black"}),
    {"red": {"green", "blue"}, "black": 1},
    Mode.EVAL,
    collections.OrderedDict(a=1),
    Config("a", tags=(1, 2)),
    Config("a", tags={"red", "green", "blue", "black"}),
    collections.OrderedDict(a={"red", "green", "blue", "black"}),
]
