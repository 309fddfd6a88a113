"""Semaphores, partial sums, tables: a launch keeps nothing that it makes; alignment is always the same."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ao_core import WHOLE, Call, Spec, quantize_tensor
from ao_core.ext import registry, to_layout
from ao_core.ext.numerics import trellis_values
from ao_core.testing.base import gaussian
from ao_kernels.triton.shared import workspace
from ao_kernels.triton.shared.workspace import COUNTER_ALIGNMENT, rows_of, split_k_workspace
from ao_kernels.triton.trellis import op as trellis
from ao_kernels.triton.trellis import records

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    monkeypatch.setattr(workspace, "_pools", {})
    monkeypatch.setattr(workspace, "SEMAPHORES", 4096)
    return workspace._pools


class Made(TorchDispatchMode):
    """Weak references to all memory that is made, and the names of the ops."""

    def __init__(self):
        super().__init__()
        self.memory, self.ops = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.add(func._opname)
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.memory.append(weakref.ref(out.untyped_storage()))
        return out


@pytest.mark.parametrize("prepared", [False, True])
def test_a_launch_keeps_nothing(prepared):
    """Neither with semaphores that were made before, nor, as in the warm-up of a graph, without."""
    if prepared:
        workspace.prepare(CPU)
    with Made() as made:
        parts = split_k_workspace(torch.empty(1), 86, 2, 128 * 16)
    assert made.memory
    assert not parts[1].any()
    del parts
    gc.collect()
    kept = {
        x.untyped_storage()._cdata for pool in workspace._pools.values() for x in [pool.semaphores]
    }
    alive = [ref() for ref in made.memory if ref() is not None]
    assert {storage._cdata for storage in alive} <= kept
    assert bool(workspace._pools) == prepared


def test_weights_bring_the_semaphores(pools):
    spec = Spec("int4", (1, 64), "float16", layout="packed")
    to_layout(quantize_tensor(gaussian((16, 64)), spec), "plane16")
    assert CPU in pools


@pytest.mark.parametrize("captured", [False, True])
def test_a_launch_keeps_no_table(monkeypatch, captured):
    """Of a trellis; in a capture that nothing came before, nothing is copied from the host either."""
    monkeypatch.setattr(trellis, "_tables", {})
    monkeypatch.setattr(trellis, "capturing", lambda device: captured)
    with Made() as made:
        table = trellis._table(CPU)
    assert table.tolist() == list(trellis_values())
    assert not captured or made.ops <= {"detach", "empty", "fill_", "unbind", "view"}
    del table
    gc.collect()
    assert made.memory
    assert not any(ref() for ref in made.memory)
    assert not trellis._tables


@pytest.mark.parametrize("captured", [False, True])
def test_who_asks_for_a_kernel_brings_the_table_of_a_trellis(monkeypatch, captured):
    monkeypatch.setattr(trellis, "_tables", {})
    monkeypatch.setattr(records, "capturing", lambda device: captured)
    options = (("scale_rule", "absmean"),)
    spec = Spec("int2", (1, WHOLE), "bfloat16", layout="trellis", options=options)
    kernel = registry.kernels.get("triton_trellis_linear")
    call = Call("linear", spec, (256, 96), (3, 96), torch.bfloat16, "cuda")
    assert kernel.refuses(call) is None
    assert (CPU in trellis._tables) == (not captured)
    if not captured:
        with Made() as made:
            assert trellis._table(CPU).tolist() == list(trellis_values())
        assert not made.memory


def test_every_slice_is_aligned(pools):
    """Llama-2's 86 tiles and two of a narrow layer: no launch is compiled anew for where its counters are."""
    workspace.prepare(CPU)
    pool = pools[CPU]
    for count in (86, 2, 1, 33, 64):
        rounded = -(-count // COUNTER_ALIGNMENT) * COUNTER_ALIGNMENT
        found = pool.take(rounded)
        assert found.data_ptr() % 128 == pool.semaphores.data_ptr() % 128
        assert len(workspace.take_semaphores(count, CPU)) % COUNTER_ALIGNMENT == 0


def test_when_none_are_left_a_launch_has_its_own(pools):
    workspace.prepare(CPU)
    pools[CPU].used = workspace.SEMAPHORES
    found = workspace.take_semaphores(40, CPU)
    assert (len(found), found.any().item()) == (64, False)
    assert found.untyped_storage()._cdata != pools[CPU].semaphores.untyped_storage()._cdata


def test_launches_of_a_stream_share_and_grow(pools):
    workspace.prepare(CPU)
    first, second = (workspace.take_semaphores(40, CPU) for _ in range(2))
    assert first.data_ptr() == second.data_ptr()
    assert len(workspace.take_semaphores(400, CPU)) == 416
    workspace.prepare(CPU)
    assert pools[CPU].used == 64 + 416
    workspace.prepare(CPU, renew=True)
    assert pools[CPU].used == 0


def test_activations_begin_at_16_bytes():
    x = torch.zeros(5, 41, dtype=torch.float16)
    for view in (x[:, 1:], x[1:], x.t(), x[:, :40]):
        rows = rows_of(view, view.shape[-1])
        assert rows.data_ptr() % 16 == 0
        assert rows.stride(-1) == 1
        assert torch.equal(rows, view)
