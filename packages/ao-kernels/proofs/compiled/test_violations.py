"""Every limit of a check can be broken: small kernels, each with one fault."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import triton
import triton.language as tl

from ao_triton_checks.aot import Build, compile_for
from ao_triton_checks.limits import Check, violations
from ao_triton_checks.sass import histogram, innermost_loop


@triton.jit
def stream(x_ptr, out_ptr, n, BLOCK: tl.constexpr, SUM: tl.constexpr, WAIT: tl.constexpr):
    """Adds up blocks: in a loop with plain loads, sums across threads, or a loop inside."""
    total = tl.zeros((BLOCK,), tl.float32)
    count = 0
    for start in range(0, n, BLOCK):
        x = tl.load(x_ptr + start + tl.arange(0, BLOCK))
        if SUM:
            x = x - tl.sum(x, 0)
        if WAIT:
            while count * count < start:
                count += 3
        total += x + count
    tl.store(out_ptr + tl.arange(0, BLOCK), total)


@triton.jit
def turn(x_ptr, out_ptr, n, SIDE: tl.constexpr):
    """A loop in which every square is turned, which goes through shared memory."""
    i = tl.arange(0, SIDE)
    at = x_ptr + i[:, None] * SIDE + i[None, :]
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for _ in range(n):
        x = tl.load(at)
        total = x + tl.trans(x) * total
        at += SIDE * SIDE
    tl.store(out_ptr + i[:, None] * SIDE + i[None, :], total)


@triton.jit
def large(a_ptr, b_ptr, out_ptr, n, SIDE: tl.constexpr):
    """A matmul of which no warp has room for the sums."""
    i, j = tl.arange(0, SIDE), tl.arange(0, 16)
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(n):
        a = tl.load(a_ptr + i[:, None] * 16 + j[None, :] + k * SIDE * 16)
        b = tl.load(b_ptr + j[:, None] * SIDE + i[None, :] + k * SIDE * 16)
        total = tl.dot(a, b, total)
    tl.store(out_ptr + i[:, None] * SIDE + i[None, :], total)


POINTERS = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
ALIGNED = ("x_ptr", "out_ptr")


def streaming(block=128, total=False, wait=False):
    constexprs = {"BLOCK": block, "SUM": total, "WAIT": wait}
    return Build(stream, POINTERS, constexprs, num_warps=4, num_stages=1, aligned=ALIGNED)


def found(build, **limits):
    """The violations of a check with these limits, and no others."""
    check = Check("", lambda: build, 255, 1 << 18, work=4, budget=1000, holding=("LDG",), absent=())
    check = replace(check, **limits)
    return violations(check, build, compile_for(build))


def test_a_kernel_within_its_limits():
    build = streaming()
    loop = innermost_loop(compile_for(build).code, ("LDG",))
    counted = histogram(loop.body)
    limits = {"registers": 64, "shared": 0, "budget": len(loop.body), "counts": counted}
    assert found(build, present=("LDG", "IMMA|FADD"), absent=("SHFL",), **limits) == []


@pytest.mark.parametrize(
    ("build", "limits", "sentence"),
    [
        (streaming(), {"registers": 8}, r"takes \d+ registers, at most 8 are allowed"),
        (streaming(total=True), {"shared": 0}, r"takes \d+ bytes of shared memory, at most 0"),
        (streaming(), {"budget": 1.0}, r"issues \d+\.\d\d instructions a unit of work, at most 1"),
        (streaming(), {"counts": {"LDG": 99}}, r"has \d LDG in its loop, expected 99"),
        (streaming(), {"present": ("HGMMA|HMMA",)}, r"has no HGMMA\|HMMA in its loop"),
        (streaming(), {"anywhere": ("HGMMA",)}, "has no HGMMA"),
        (streaming(), {"holding": ("LDGSTS",)}, "has no loop with one of LDGSTS"),
        (streaming(total=True), {"absent": ("SHFL",)}, r"has \d+ SHFL in its loop"),
        (streaming(), {"holding": ()}, "has 1 loops inside the loop that is counted"),
        (streaming(wait=True), {}, "has 1 loops inside the loop that is counted"),
    ],
)
def test_each_limit_is_checked(build, limits, sentence):
    (text,) = found(build, **limits)
    assert re.match(sentence, text)


def test_spills_are_found():
    types = {"a_ptr": "*fp16", "b_ptr": "*fp16", "out_ptr": "*fp32", "n": "i32"}
    build = Build(large, types, {"SIDE": 128}, num_warps=1, num_stages=1)
    sentences = found(build, work=0)
    assert [text.split()[0] for text in sentences] == ["spills"]


def test_layout_conversions_in_loops_are_found():
    build = Build(turn, POINTERS, {"SIDE": 32}, num_warps=4, num_stages=1, aligned=ALIGNED)
    compiled = compile_for(build)
    assert compiled.conversions_in_loops
    sentences = violations(Check("", lambda: build, 255, 1 << 18), build, compiled)
    assert {text.partition(":")[0] for text in sentences} == {"converts a layout in a loop"}


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match=r"\['n', 'BLOCK'\] of stream have neither"):
        compile_for(Build(stream, {"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"SUM": 0, "WAIT": 0}))
