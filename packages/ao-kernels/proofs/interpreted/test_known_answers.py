"""Known-answer tests in Triton's interpreter: every family passes its own, and a broken kernel does not.

On a GPU they run before a kernel serves its first call, see `ao_kernels.triton.shared.known_answer`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ao_core import Spec
from ao_core.ext import registry
from ao_kernels import answers
from ao_kernels.cpu.codes import codes_of
from ao_kernels.triton.adam import records as adam
from ao_kernels.triton.adam.op import STATES
from ao_kernels.triton.attend import records as attend
from ao_kernels.triton.bsr import records as bsr
from ao_kernels.triton.cast import records as cast
from ao_kernels.triton.fake_quantize import records as fake_quantize
from ao_kernels.triton.hadamard import records as hadamard
from ao_kernels.triton.rows import records as rows
from ao_kernels.triton.scaled_mm import records as scaled_mm
from ao_kernels.triton.shared import known_answer
from ao_kernels.triton.shared.known_answer import answer, every_code, proven
from ao_kernels.triton.sparsify import records as sparsify
from ao_kernels.triton.w4a8 import records as w4a8
from ao_kernels.triton.weight_only import kernel_codes, samples
from ao_kernels.triton.weight_only import records as weight_only

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

from known import FAMILIES, INT4, PLANES, call

# Triton 3.6 with NumPy 2.2
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("optimizer_states"),
]

CPU, HALF = torch.device("cpu"), torch.float16
#: call of `known.FAMILIES` → the kernel, and the sample that stands for it
SAMPLES = {
    **{f"linear {name}": (weight_only.plane16_linear, samples.linear) for name in (*PLANES, "2:4")},
    "experts": (weight_only.plane16_grouped_linear, samples.grouped_linear),
    "dequantize": (weight_only.plane16_dequantize, samples.dequantize),
    "embedding": (weight_only.plane16_embedding, samples.embedding),
    "w4a8": (w4a8.linear, w4a8._sample),
    "w8a8": (scaled_mm.linear, scaled_mm._sample),
    "w8a8 with sums": (scaled_mm.linear_with_sums, scaled_mm._sample),
    "mm": (scaled_mm.mm, scaled_mm._sample),
    "bsr": (bsr.linear, bsr._sample),
    "rows": (rows.quantize, lambda c: rows._sample(c, "quantize")),
    "rms_norm": (rows.rms_norm_quantize, lambda c: rows._sample(c, "rms_norm_quantize")),
    "silu_mul": (rows.silu_mul_quantize, lambda c: rows._sample(c, "silu_mul_quantize")),
    "cast": (cast.quantize_both, cast._sample),
    "mx": (fake_quantize.fake_quantize, fake_quantize._sample),
    "hadamard": (hadamard.hadamard, hadamard._sample),
    "paley": (hadamard.hadamard, hadamard._sample),
    "attend": (attend.attend, attend._sample),
    "two_four": (sparsify.quantize_two_four, sparsify._sample),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_answers_right(name):
    fn, sample = SAMPLES[name]
    asked = FAMILIES[name]
    assert answer(asked.op, fn, sample(asked), CPU) is None


@pytest.mark.parametrize("specs", STATES, ids=lambda specs: specs[0].dtype)
def test_a_step_of_adam(specs):
    if "adam_step" not in registry.ops:
        return  # an op of ao-optim
    asked = type("StepCall", (), {"specs": specs, "param_dtype": HALF, "grad_dtype": HALF})()
    assert answer("adam_step", adam.adam_step, adam._sample(asked), CPU) is None


@pytest.mark.parametrize(("k", "dtype"), [(302, HALF), (304, torch.float32)])
def test_masks_of_tiles(k, dtype):
    if "tile_mask" not in registry.ops:
        return  # an op of ao-sparsity
    asked = type("MaskCall", (), {"x_shape": (40, k), "x_dtype": dtype})()
    sample = sparsify._mask_sample(asked)
    assert answer("tile_mask", sparsify.tile_mask, sample, CPU) is None

    def turned(x):
        return sparsify.tile_mask(x.flip(0)).flip(0)

    assert "wrong numbers" in answer("tile_mask", turned, sample, CPU)


def test_every_triton_kernel_has_a_known_answer():
    """Their `refuses` is that of `proven`, which asks a sample."""
    refusals = {
        name: kernel.refuses for name, kernel in registry.kernels.items() if name[:7] == "triton_"
    }
    assert len(refusals) > 20
    without = [name for name, fn in refusals.items() if "proven" not in fn.__qualname__]
    assert not without


@pytest.mark.parametrize("name", ["int4", "f6e3m2", "uint8", "f8e4m3"])
def test_every_code_occurs_in_every_plane(name):
    layout = "plane16_bytes" if name in ("uint8", "f8e4m3") else "plane16"
    zero_point = "int" if name == "uint8" else "none"
    w = every_code(Spec(name, (1, 64), "float16", zero_point, layout), (128, 256))
    values = registry.dtypes.get(name)
    # 0 and -0 are one number
    wanted = len({v for v in codes_of(values).values[: values.codes] if abs(v) < float("inf")})
    scale = w.canonical().scale.float().repeat_interleave(64, 1)
    numbers = w.dequantize(torch.float32) / scale
    assert all(
        len(numbers[:, k].mul(256).round().unique()) > wanted // 3 for k in range(0, 256, 17)
    )
    assert len(numbers.mul(2**20).round().unique()) >= wanted


def test_a_broken_kernel_is_refused(monkeypatch):
    """One that swaps planes: with the sentence that `explain` shows, and for each kind asked once."""
    right, asked = kernel_codes.k_of, []
    monkeypatch.setattr(answers, "_found", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(known_answer, "current_device", lambda: CPU)
    monkeypatch.setattr(samples, "current_device", lambda: CPU)
    monkeypatch.setattr(answers, "_kept_or_answered", lambda *given: asked.append(1) or given[-1]())

    def swapped(x, w, bias):
        return weight_only.plane16_linear(x.roll(64, -1), w, bias)

    refuses = proven("linear", swapped, lambda call: None, samples.linear)
    reason = refuses(call("linear", INT4))
    assert reason.startswith("gives wrong numbers on this device: ")
    assert "expected" in reason
    assert refuses(call("linear", INT4, x=(2, 4096))) == reason or len(asked) == 2
    assert refuses(call("linear", INT4)) == reason
    assert len(asked) <= 2
    assert right is kernel_codes.k_of


def test_a_kernel_that_fails_is_refused():
    def fails(*args):
        raise RuntimeError("misaligned address\nmore")

    reason = answer("linear", fails, samples.linear(call("linear", INT4)), CPU)
    assert reason == "cannot run on this device: RuntimeError: misaligned address"
