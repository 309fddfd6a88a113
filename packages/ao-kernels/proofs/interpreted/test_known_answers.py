"""Known-answer tests in Triton's interpreter: every family passes its own, and a broken kernel does not.

On a GPU they run before a kernel serves its first call, see `ao_kernels.triton.shared.known_answer`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ao_core import WHOLE, Call, Spec
from ao_core.ext import NO_SCALE, registry
from ao_core.ext.kernels import AttendCall, Attention
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

# Triton 3.6 with NumPy 2.2
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("optimizer_states"),
]

CPU, HALF, ROW = torch.device("cpu"), torch.float16, (1, WHOLE)
INT4 = Spec("int4", (1, 128), "float16", layout="plane16")
UINT8 = Spec("uint8", ROW, zero_point="int")


def call(op, spec, shape=(4096, 4096), x=(3, 4096), dtype=HALF):
    return Call(op, spec, shape, x, dtype, "cuda")


def attention(key, value, queries=1, memory=256):
    """Two queries of a head for each of keys."""
    return AttendCall(
        key, value, (1, 4, queries, 64), (1, 2, memory, 64), 64, 128, HALF, Attention(0.125),
        False, False, False, "cuda",
    )  # fmt: skip


KV = Spec("int8", (1, WHOLE), "float16", layout="plain")
PLANES = {
    "int4": INT4,
    "uint4": Spec("uint4", (1, 64), "float16", "float", "plane16"),
    "nf4": Spec("nf4", ROW, "float16", layout="plane16"),
    "f6e3m2": Spec("f6e3m2", (1, 32), "e8m0", layout="plane16"),
    "uint8": Spec("uint8", (1, 64), "float16", "int", "plane16_bytes"),
}
SAMPLES = {
    **{
        f"linear {name}": (weight_only.plane16_linear, samples.linear, call("linear", spec))
        for name, spec in PLANES.items()
    },
    "linear 2:4": (
        weight_only.plane16_linear, samples.linear, call("linear", replace(INT4, layout="plane24"))
    ),
    "experts": (
        weight_only.plane16_grouped_linear, samples.grouped_linear,
        call("grouped_linear", PLANES["uint4"], (8, 4096, 4096), (24, 4096)),
    ),
    "dequantize": (
        weight_only.plane16_dequantize, samples.dequantize, call("dequantize", INT4, (4096, 4112))
    ),
    "embedding": (
        weight_only.plane16_embedding, samples.embedding, call("embedding", INT4, x=(3,), dtype=torch.int64)
    ),
    "w4a8": (
        w4a8.linear, w4a8._sample,
        call("linear", Spec("uint4", (1, 64), "float16", "int", "plane32", act=UINT8)),
    ),
    "w8a8": (scaled_mm.linear, scaled_mm._sample, call("linear", Spec("int8", ROW, act=UINT8))),
    "w8a8 with sums": (
        scaled_mm.linear_with_sums, scaled_mm._sample,
        call("linear", Spec("int8", ROW, layout="row_sums", act=UINT8), (4096, 4104), (3, 4104)),
    ),
    "mm": (
        scaled_mm.mm, scaled_mm._sample,
        call("mm", Spec("f8e4m3", (128, 128), act=Spec("f8e4m3", (1, 128))), x=(200, 4096)),
    ),
    "bsr": (
        bsr.linear, bsr._sample,
        call("linear", Spec("fp16", ROW, NO_SCALE, layout="bsr_sorted", options=(("blocksize", 32),))),
    ),
    "rows": (
        rows.quantize, lambda c: rows._sample(c, "quantize"), call("quantize", Spec("int8", ROW), x=(3, 300))
    ),
    "rms_norm": (
        rows.rms_norm_quantize, lambda c: rows._sample(c, "rms_norm_quantize"),
        call("rms_norm_quantize", Spec("f8e4m3", ROW), x=(3, 300)),
    ),
    "silu_mul": (
        rows.silu_mul_quantize, lambda c: rows._sample(c, "silu_mul_quantize"),
        call("silu_mul_quantize", Spec("int8", ROW), x=(3, 300)),
    ),
    "cast": (cast.quantize_both, cast._sample, call("quantize_both", Spec("f8e4m3", (1, 128)))),
    "mx": (
        fake_quantize.fake_quantize, fake_quantize._sample,
        call("fake_quantize", Spec("f4e2m1", (1, 32), "e8m0"), x=(3, 40)),
    ),
    "hadamard": (hadamard.hadamard, hadamard._sample, call("hadamard", Spec("int8", (1, 64)))),
    "paley": (hadamard.hadamard, hadamard._sample, call("hadamard", Spec("int8", (1, 12 * 16)))),
    "attend": (attend.attend, attend._sample, attention(KV, KV)),
    "two_four": (
        sparsify.quantize_two_four, sparsify._sample,
        call("quantize", Spec("fp16", ROW, NO_SCALE, layout="two_four"), x=(3, 302)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_every_family_answers_right(name):
    fn, sample, asked = SAMPLES[name]
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
