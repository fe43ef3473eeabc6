"""`Precision`: three dtypes, and `cast` with each of them."""

import pytest
import torch
from tensordict import TensorDict

from tdbridge import LeafTypeError, Precision, consolidate, to_jax

KEYS = ["w", ("norm", "w")]


def params() -> TensorDict:
    return TensorDict(w=torch.ones(2), norm={"w": torch.ones(2)}, step=torch.tensor(3))


@pytest.mark.parametrize("side", ["torch", "jax"])
def test_each_method_casts_to_its_dtype(side: str):
    """`keep` is for the computation alone; integers never change."""
    tree = params() if side == "torch" else to_jax(params())
    precision = Precision("float64", torch.bfloat16, "float16", keep="norm")
    low = precision.to_compute(tree)
    trees = low, precision.to_output(low), precision.to_param(low)
    found = [[str(tree[key].dtype).split(".")[-1] for key in KEYS] for tree in trees]
    assert found == [["bfloat16", "float32"], ["float16"] * 2, ["float64"] * 2]
    assert {str(t["step"].dtype) for t in trees} == {str(tree["step"].dtype)}


def test_out_is_handed_on():
    """The low-precision copy of consolidated parameters is filled again at each step."""
    whole, precision = consolidate(params()), Precision()
    low = precision.to_compute(whole)
    whole["w"].fill_(2.5)
    assert precision.to_compute(whole, out=low) is low
    assert low["w"].tolist() == [2.5, 2.5]


def test_text_is_parsed():
    """Names in full or by their first letter, in any order; the rest has its default."""
    parse = Precision.parse
    assert parse("params=float32, compute=bfloat16,output=float32") == Precision()
    assert parse("o=float16,c=float16,p=float64") == Precision("float64", "float16", "float16")
    assert parse("compute=float16", keep="norm") == Precision(compute="float16", keep="norm")


@pytest.mark.parametrize("text", ["", "bfloat16", "x=float32", "c=", "p=float32,params=float32"])
def test_other_text_is_refused(text: str):
    """The error names the part that is wrong, and what was expected."""
    with pytest.raises(ValueError, match=r'expected "params='):
        Precision.parse(text)


def test_a_wrong_dtype_is_refused_at_once():
    """Not only when it is first used."""
    with pytest.raises(LeafTypeError, match="got dtype int8"):
        Precision(compute=torch.int8)
    with pytest.raises(LeafTypeError, match="bf16"):
        Precision.parse("compute=bf16")
