"""Where a private function of torch or tensordict is gone, batches are the same."""

import pytest
import torch
from tensordict import TensorDict

import tdbridge._compat.tensordict as compat_tensordict
import tdbridge._compat.torch as compat_torch
from tdbridge.layout import layout_of
from tdbridge.layout.allocate import allocate_shared
from tdbridge.loaders import collate
from tests import zoo


@pytest.mark.parametrize("count", [0, 64, 70000])
@pytest.mark.parametrize("public", [False, True])
def test_shared_memory(monkeypatch, public, count):
    assert compat_torch._new_shared is not None
    if public:
        monkeypatch.setattr(compat_torch, "_new_shared", None)
    found = compat_torch.shared_bytes(count)
    assert found.shape == (count,)
    assert found.dtype == torch.uint8
    assert found.is_shared()
    assert found.data_ptr() % 64 == 0
    assert found.storage_offset() == 0
    assert not found.any()


def test_a_shared_buffer_is_as_long_as_its_layout():
    layout = layout_of(zoo.nested())
    assert allocate_shared(layout).shape == (layout.nbytes,)


@pytest.mark.parametrize("name", ["nested", "tensorclass", "deeper_batch", "subclass"])
def test_entries_and_names(monkeypatch, name):
    expected = zoo.described(collate([zoo.TREES[name]()] * 2))

    def gone(_):
        raise AttributeError

    monkeypatch.setattr(compat_tensordict, "_own_entries", gone)
    monkeypatch.setattr(compat_tensordict, "_own_names", gone)
    assert zoo.described(collate([zoo.TREES[name]()] * 2)) == expected


def test_names_are_not_overlooked():
    named = TensorDict(x=torch.ones(2), batch_size=[2], names=["t"])
    assert compat_tensordict.all_unnamed([zoo.flat(), zoo.flat()])
    assert not compat_tensordict.all_unnamed([zoo.flat(), named])
