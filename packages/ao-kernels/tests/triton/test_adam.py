"""What the optimizer's Triton kernel says where it cannot serve."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch

from ao_core import Spec, quantize_tensor
from ao_core.ext import UnsupportedOp, registry
from ao_kernels.triton.adam import op as adam
from ao_kernels.triton.adam import records
from ao_kernels.triton.shared import device

pytestmark = pytest.mark.usefixtures("optimizer_states")

KERNEL = registry.kernels.get("triton_adam_step")
STATE = Spec("f8e4m3", (256,), layout="flat")
SQUARES = Spec("f8e5m3u", (256,), layout="flat")
OPTIONS = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 1, "decoupled": True,
    "maximize": False, "seed": None,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """What the kernel looks at of a call; the op is of ao-optim, which need not be installed."""

    specs: tuple[Spec, ...] = (STATE, SQUARES)
    param_dtype: torch.dtype = torch.bfloat16
    grad_dtype: torch.dtype = torch.bfloat16


def test_calls():
    assert KERNEL.refuses(Call()) is None
    int8, small = (Spec("int8", (256,), layout="flat"), Spec("f8e4m3", (128,), layout="flat"))
    assert "found int8" in KERNEL.refuses(Call((int8, SQUARES)))
    assert "found f8e4m3[128]" in KERNEL.refuses(Call((small, SQUARES)))
    assert "and int8" in KERNEL.refuses(Call((STATE, int8)))
    first, second = adam.STATES[1]
    assert KERNEL.refuses(Call((first, second))) is None
    assert "and companded8u[256]" in KERNEL.refuses(Call((STATE, second)))
    assert "parameters of" in KERNEL.refuses(Call(param_dtype=torch.float64))
    assert "gradients of" in KERNEL.refuses(Call(grad_dtype=torch.float64))


def test_devices(monkeypatch):
    """Float8 needs a newer one than companded moments do."""
    assert KERNEL.unavailable() is not None
    monkeypatch.setattr(device, "unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert records._refuses(Call()) == "needs sm_89, found sm_86"
    assert records._refuses(Call(adam.STATES[1])) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert records._refuses(Call()) is None


def test_tensors_are_checked_before_anything_changes():
    tensors = [torch.ones(4, 6)]
    moments, squares = ([quantize_tensor(torch.ones(4, 6), each)] for each in (STATE, SQUARES))
    other = [quantize_tensor(torch.ones(4, 6), Spec("int8", (256,), layout="flat"))]
    with pytest.raises(UnsupportedOp, match=r"exp_avgs\[0\].*needs f8e4m3.*found int8"):
        adam.adam_step(tensors, tensors, other, squares, **OPTIONS)
    with pytest.raises(UnsupportedOp, match=r"exp_avg_sqs\[0\].*needs f8e5m3u.*found f8e4m3"):
        adam.adam_step(tensors, tensors, moments, moments, **OPTIONS)
    with pytest.raises(UnsupportedOp, match=r"exp_avg_sqs\[0\].*found torch.float32"):
        adam.adam_step(tensors, tensors, moments, tensors, **OPTIONS)
    strided = [torch.ones(6, 4).t()]
    with pytest.raises(UnsupportedOp, match=r"params\[0\].*contiguous.*strides"):
        adam.adam_step(strided, tensors, moments, squares, **OPTIONS)


def test_nothing_to_do():
    nothing = ([quantize_tensor(torch.ones(0), each)] for each in (STATE, SQUARES))
    adam.adam_step([torch.ones(0)], [torch.ones(0)], *nothing, **OPTIONS)
    adam.adam_step([], [], [], [], **OPTIONS)


def test_chunks_cover_every_tensor():
    sizes = (1, 0, 3 * adam.CHUNK, 2 * adam.CHUNK + 1)
    where = adam._Addresses((16,) * 4, (32,) * 4, ((48,) * 4,) * 4, sizes)
    table, chunks, aligned = adam._tables(where, torch.device("cpu"))
    assert table.tolist() == [[16, 32, 48, 48, 48, 48, size] for size in sizes]
    assert aligned
    assert adam._tables(where, torch.device("cpu"))[0] is table  # built once for the same tensors
    assert not adam._tables(where._replace(grads=(8,) * 4), torch.device("cpu"))[2]
    assert chunks.tolist() == [[0, 0], [2, 0], [2, 1], [2, 2], [3, 0], [3, 1], [3, 2]]


def test_a_graph_captures_steps_that_were_taken(monkeypatch):
    """Otherwise the table would be copied from memory that the host writes to again."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedOp, match="take one step"):
        adam._uploaded(torch.zeros(1), torch.device("cuda", 0))


def test_a_graph_keeps_its_tables(monkeypatch):
    """More tensors than the cache has room for come later, and a replay reads where the tables were."""
    monkeypatch.setattr(adam, "_captured", {})
    cpu, captured = torch.device("cpu"), False
    monkeypatch.setattr(adam, "capturing", lambda device: captured)

    def memory(first):
        where = adam._Addresses((first,), (32,), ((48,),) * 4, (adam.CHUNK,))
        return [weakref.ref(x.untyped_storage()) for x in adam._tables_of(where, cpu)[:2]]

    memory(1 << 20)
    captured = True
    of_graph = memory(1 << 20)
    captured = False
    of_no_graph = memory(1 << 21)
    for i in range(20):
        memory(16 * i)
    gc.collect()
    assert all(ref() is not None for ref in of_graph)
    assert not any(ref() is not None for ref in of_no_graph)
