"""Semaphores and partial sums: a launch keeps nothing that it makes, and alignment is always the same."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ao_core import Spec, quantize_tensor
from ao_core.ext import to_layout
from ao_core.testing.base import gaussian
from ao_kernels.triton.shared import workspace
from ao_kernels.triton.shared.workspace import COUNTER_ALIGNMENT, rows_of, split_k_workspace

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    monkeypatch.setattr(workspace, "_pools", {})
    monkeypatch.setattr(workspace, "SEMAPHORES", 4096)
    return workspace._pools


class Made(TorchDispatchMode):
    """Weak references to all memory that is made."""

    def __init__(self):
        super().__init__()
        self.memory = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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
