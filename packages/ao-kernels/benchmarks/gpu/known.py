"""Known-answer tests of every family and format: each kernel of a call is asked, as before a first call.

Right answers are not looked for on disk, so that each kernel runs.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from measuring import Case, Line, Setup

from ao_core import WHOLE, Call, Spec
from ao_core.ext import NO_SCALE, registry
from ao_core.ext.kernels import AttendCall, Attention, candidates
from ao_kernels import answers

HALF, BF16, ONE = torch.float16, torch.bfloat16, (1, WHOLE)
INT4 = Spec("int4", (1, 128), "float16", layout="plane16")
UINT8 = Spec("uint8", ONE, zero_point="int")
KV = Spec("int8", ONE, "float16", layout="plain")
#: numbers of rows that matmuls have tiles of their own for
ROWS = (1, 32, 64, 128)


def call(
    op: str,
    spec: Spec,
    shape: tuple[int, ...] = (4096, 4096),
    x: tuple[int, ...] = (3, 4096),
    dtype: torch.dtype = HALF,
) -> Call:
    """Of a weight or a tensor of this format."""
    return Call(op, spec, shape, x, dtype, "cuda")


def attention(key: Spec, value: Spec, queries: int = 1, memory: int = 256) -> AttendCall:
    """Two queries of a head for each of keys."""
    return AttendCall(
        key, value, (1, 4, queries, 64), (1, 2, memory, 64), 64, 128, HALF, Attention(0.125),
        False, False, False, "cuda",
    )  # fmt: skip


#: ways to store weights in planes that differ in how a kernel reads them
PLANES = {
    "int4": INT4,
    "uint4": Spec("uint4", (1, 64), "float16", "float", "plane16"),
    "nf4": Spec("nf4", ONE, "float16", layout="plane16"),
    "f6e3m2": Spec("f6e3m2", (1, 32), "e8m0", layout="plane16"),
    "uint8": Spec("uint8", (1, 64), "float16", "int", "plane16_bytes"),
}
_BLOCKS = Spec("fp16", ONE, NO_SCALE, layout="bsr_sorted", options=(("blocksize", 32),))
_SUMS = Spec("int8", ONE, layout="row_sums", act=UINT8)
#: a call of each family of kernels
FAMILIES: dict[str, Any] = {
    **{f"linear {name}": call("linear", spec) for name, spec in PLANES.items()},
    "linear 2:4": call("linear", replace(INT4, layout="plane24")),
    "experts": call("grouped_linear", PLANES["uint4"], (8, 4096, 4096), (24, 4096)),
    "dequantize": call("dequantize", INT4, (4096, 4112)),
    "embedding": call("embedding", INT4, x=(3,), dtype=torch.int64),
    "w4a8": call("linear", Spec("uint4", (1, 64), "float16", "int", "plane32", act=UINT8)),
    "w8a8": call("linear", Spec("int8", ONE, act=UINT8)),
    "w8a8 with sums": call("linear", _SUMS, (4096, 4104), (3, 4104)),
    "mm": call("mm", Spec("f8e4m3", (128, 128), act=Spec("f8e4m3", (1, 128))), x=(200, 4096)),
    "bsr": call("linear", _BLOCKS),
    "rows": call("quantize", Spec("int8", ONE), x=(3, 300)),
    "rms_norm": call("rms_norm_quantize", Spec("f8e4m3", ONE), x=(3, 300)),
    "silu_mul": call("silu_mul_quantize", Spec("int8", ONE), x=(3, 300)),
    "cast": call("quantize_both", Spec("f8e4m3", (1, 128))),
    "mx": call("fake_quantize", Spec("f4e2m1", (1, 32), "e8m0"), x=(3, 40)),
    "hadamard": call("hadamard", Spec("int8", (1, 64))),
    "paley": call("hadamard", Spec("int8", (1, 12 * 16))),
    "attend": attention(KV, KV),
    "two_four": call("quantize", Spec("fp16", ONE, NO_SCALE, layout="two_four"), x=(3, 302)),
}
_F8, _I8 = (Spec(name, ONE, act=Spec(name, ONE)) for name in ("f8e4m3", "int8"))
_W4A8 = Spec("int4", (1, 64), "float16", layout="plane32", act=Spec("f8e4m3", ONE))
_PLANE24 = replace(INT4, layout="plane24")
_BYTES = Spec("int8", (1, 128), "bfloat16", layout="plane16_bytes")
_KV4 = Spec("uint4", (1, 64), "float16", "float", layout="packed")
_EXPERTS: dict[str, Any] = {"shape": (8, 4096, 4096), "x": (24, 4096)}
_TRELLIS = Spec("int2", ONE, "float16", layout="trellis", options=(("scale_rule", "absmean"),))
#: one of each kernel that those leave out
OTHERS: dict[str, Any] = {
    "w8a8 float8": call("linear", _F8),
    "w4a8 float8": call("linear", _W4A8),
    "attend kv4": attention(_KV4, _KV4),
    "attend k8v4": attention(KV, _KV4),
    "trellis": call("linear", _TRELLIS),
    "dequantize trellis": call("dequantize", _TRELLIS),
    "experts in 2:4": call("grouped_linear", _PLANE24, **_EXPERTS),
    "experts in bytes": call("grouped_linear", _BYTES, **_EXPERTS),
    "mm int8": call("mm", _I8, x=(200, 4096)),
    "cast of rows": call("quantize", Spec("f8e4m3", ONE), x=(3, 300)),
    "rms_norm int8": call("rms_norm_quantize", Spec("int8", ONE), x=(3, 300)),
    "silu_mul float8": call("silu_mul_quantize", Spec("f8e4m3", ONE), x=(3, 300)),
    **{
        f"{op} {spec.dtype}": call(op, spec, **_EXPERTS)
        for op in ("grouped_linear", "grouped_mm")
        for spec in (_F8, _I8)
    },
    **{
        f"{op} {name}": call(op, spec, x=x, dtype=dtype)
        for op, x, dtype in (("dequantize", (3, 4096), HALF), ("embedding", (3,), torch.int64))
        for name, spec in (("2:4", _PLANE24), ("bytes", _BYTES))
    },
}
_FLOATS = (
    *("f3e1m1", "f4e1m2", "f4e2m1", "f5e1m3", "f5e2m2", "f5e3m1", "f6e1m4", "f6e2m3", "f6e3m2", "f6e4m1"),
    *("f7e1m5", "f7e2m4", "f7e3m3", "f7e4m2", "f8e1m6", "f8e2m5", "f8e3m4", "f8e4m3", "f8e5m2"),
)  # fmt: skip


def weights() -> dict[str, Spec]:
    """Every number format that planes hold, the common ones first; with groups, scales and zero points."""
    first = ("int4", "int8", "f8e4m3", "nf4", "uint4", "f4e2m1", "f6e2m3")
    names = dict.fromkeys(
        (*first, *(f"{sign}{bits}" for bits in range(1, 9) for sign in ("int", "uint"))), (1, 128)
    )
    names |= dict.fromkeys((*_FLOATS, "ternary", "iq4_nl"), (1, 128))
    found = {}
    for name, block in names.items():
        layout = "plane16_bytes" if registry.dtypes.get(name).bits == 8 else "plane16"
        points = ("int", "float") if name.startswith("uint") else ("none",)
        for point in points:
            end = "" if point == "none" else f", {point} zero points"
            found[f"{name} g128{end}"] = Spec(name, block, "bfloat16", point, layout)
    for name in ("int8", "f8e4m3"):
        found[f"{name} rows"] = Spec(name, ONE, "float32", layout="plane16_bytes")
    nested = Spec("f8e4m3", (WHOLE, WHOLE), "float32")
    found["mxfp4"] = Spec("f4e2m1", (1, 32), "e8m0", layout="plane16")
    found["nvfp4"] = Spec("f4e2m1", (1, 16), nested, layout="plane16")
    return found


def of_others() -> dict[str, Any]:
    """The ops of ao-optim and ao-sparsity, where these are installed."""
    found: dict[str, Any] = {}
    if "adam_step" in registry.ops:
        from ao_kernels.triton.adam.op import STATES
        from ao_optim.calls import StepCall

        for specs in STATES:
            step = StepCall("adam_step", specs, 1000, BF16, BF16, "cuda")
            found[f"adam {specs[0].dtype}"] = step
    if "tile_mask" in registry.ops:
        from ao_sparsity.train.kernels import MaskedCall

        found["tile_mask"] = MaskedCall("tile_mask", (40, 304), (40, 304), BF16, "cuda")
    return found


def calls() -> dict[str, Any]:
    """All, the most important first."""
    registry.freeze()
    formats = weights()
    return {
        **FAMILIES,
        **of_others(),
        **OTHERS,
        **{
            f"{name}, {rows} rows": call("linear", spec, x=(rows, 4096), dtype=BF16)
            for rows in ROWS
            for name, spec in formats.items()
        },
    }


def cases(setup: Setup) -> list[Case]:
    """One for each call."""
    os.environ["AO_CACHE"] = tempfile.mkdtemp(prefix="ao-known-")
    return [Case(name, partial(asked, name, each)) for name, each in calls().items()]


def asked(name: str, call: Any) -> Iterator[Line]:
    """What each kernel for the device says to a call; a wrong answer fails the case."""
    known, began = answers.wrong(), time.perf_counter()
    found = {
        each.kernel.name: each.refusal
        for each in candidates(call)
        if each.kernel.device == "cuda" and each.kernel.priority >= 50
    }
    seconds = time.perf_counter() - began
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    yield {"call": name, "kernels": found, "seconds": round(seconds, 2)}
    if wrong := {kind: reason for kind, reason in answers.wrong().items() if kind not in known}:
        raise AssertionError("; ".join(wrong.values()))
