"""Which calls of attention the kernel takes, and how; its numbers are in proofs/interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ao_core import WHOLE, Spec
from ao_core.ext import hadamard_step, registry
from ao_core.ext.kernels import AttendCall, Attention
from ao_kernels.triton.attend.op import launch_shape
from ao_kernels.triton.attend.operand import operand
from ao_kernels.triton.shared.ptx import multiply_add
from ao_triton_checks.asm import run

TOKEN = Spec("int8", (1, WHOLE), "float16")
PACKED = ("float16", "float", "packed")


def rotated(block, size=128):
    return Spec("uint4", block, *PACKED, input=(hadamard_step(size),))


def call(key=TOKEN, value=TOKEN, dim=128, dtype=torch.bfloat16, memory=4096, queries=1):
    return AttendCall(
        key, value, (1, 32, queries, dim), (1, 8, memory, dim), dim, 256, dtype, Attention(0.1), True, False,
        False, "cuda",
    )  # fmt: skip


def reason(**given):
    found = call(**given)
    kernel = registry.kernels.get(f"triton_attend_{found.layout}")
    why = kernel.refuses(found)
    assert why is not None or kernel.describe(found)
    return why


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (TOKEN, TOKEN),
        (TOKEN, rotated((1, 64))),
        (rotated((128, 1)), rotated((1, WHOLE))),
        (Spec("f8e4m3", (1, WHOLE), "float16"), Spec("f8e5m2", (1, 64), "float32")),
        (Spec("int4", (1, WHOLE), layout="packed"), Spec("uint8", (1, 32), "bfloat16", "int")),
    ],
    ids=str,
)
def test_what_is_taken(key, value):
    for dtype in (torch.bfloat16, torch.float16):
        assert reason(key=key, value=value, dtype=dtype) is None
    for dim in (64, 80, 96):
        assert reason(key=TOKEN, value=TOKEN, dim=dim, queries=77) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": torch.float32}, "not torch.float32"),
        ({"memory": 0}, "needs memory for keys"),
        ({"dim": 256}, "128 elements at most, in words of 2, found 256"),
        ({"dim": 63}, "found 63"),
        ({"key": Spec("nf4", (1, 64), "float16", layout="packed")}, "not nf4"),
        ({"key": Spec("int6", (1, 64), "float16", layout="packed")}, "not int6"),
        ({"key": Spec("uint4", (1, 64), "float16")}, "in the layout packed"),
        ({"key": Spec("int8", (1, WHOLE), "e8m0")}, "found e8m0"),
        ({"value": Spec("int8", (1, 64), "float32", "offset")}, "of values: takes zero points off"),
        ({"key": Spec("int8", (16, 1), "float16")}, "multiples of 64 tokens, found 16"),
        ({"key": Spec("int8", (1, 16), "float16")}, "groups of 32 or of a greater power of two"),
        ({"value": Spec("int8", (128, 1), "float16")}, "of values: takes scales of tokens"),
        ({"value": Spec("int8", (1, 2, 1, WHOLE), "float16")}, "of one head each"),
        ({"key": rotated((1, WHOLE), 12), "dim": 96}, "of powers of two, found hadamard(12)"),
    ],
)  # fmt: skip
def test_what_is_refused(given, words):
    assert words in reason(**given)


@pytest.mark.parametrize(
    ("rows", "heads", "memory", "shape"),
    [
        (4, 8, 131072, (16, 64, 2, 1, 66)),
        (4, 8, 4096, (16, 64, 2, 1, 16)),
        (4, 256, 4096, (16, 64, 2, 1, 2)),
        (17, 8, 128, (32, 64, 4, 1, 1)),
        (8192, 8, 4096, (64, 32, 8, 128, 1)),
    ],
)
def test_tiles_and_splits(rows, heads, memory, shape):
    assert launch_shape(rows, heads, memory, 132) == shape


def test_how_words_are_read():
    """Of codes in a word, what makes them those that are decoded, and the scales of padding."""
    assert operand(TOKEN, 80, 64)[:7] == (80, 128, 1, False, 2, -0x7F80, 0)
    assert operand(rotated((128, 1)), 128, 256)[:7] == (128, 128, 128, True, 4, 0, 8)
    assert operand(rotated((1, 64)), 72, 256)[:4] == (72, 64, 1, False)


def test_a_product_and_a_sum_of_two_neighbours():
    a, b, c = (
        np.full(1, value, np.float16).view(np.uint16).astype(np.uint32) for value in (3, 0.5, -8)
    )
    (found,) = run(multiply_add("fp16"), a | a << 16, b | b << 16, c | c << 16)
    assert found.astype(np.uint32).view(np.float16).tolist() == [-6.5, -6.5]
