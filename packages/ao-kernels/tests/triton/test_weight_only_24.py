"""The layout `plane24`, its assembly, and what its kernels refuse; matmuls are in proofs/interpreted."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ao_core import WHOLE, Call, Spec
from ao_core.ext import registry
from ao_core.ext.numerics import pack_bits
from ao_kernels.triton.weight_only.formats import known
from ao_kernels.triton.weight_only.layout24 import Plane24
from ao_kernels.triton.weight_only.lut_ptx import load_table
from ao_kernels.triton.weight_only.sparse_ptx import PATTERNS, two_of_four
from ao_triton_checks.asm import run

LAYOUT, INT4 = Plane24(), registry.dtypes.get("int4")
LINEAR = registry.kernels.get("triton_plane24_linear")


def spec_of(group, scale="float32"):
    return Spec("int4", (1, group), scale, layout="plane24")


def problem(shape, group):
    """Canonical parts of a random weight, and its codes with zeros."""
    generator = torch.Generator().manual_seed(sum(shape))
    n, k = shape
    fours = -(-k // 4)
    order = torch.rand(n, fours, 4, generator=generator).argsort(-1)
    places = order[..., :2].sort(-1).values
    kept = torch.randint(-8, 8, (n, fours, 2), generator=generator)
    kept[(places >= k - 4 * torch.arange(fours)[:, None])] = 0
    dense = torch.zeros(n, fours, 4, dtype=torch.int64).scatter_(-1, places, kept)
    index = F.pad(places[..., 0] | places[..., 1] << 2, (0, fours % 2), value=0b0100)
    groups = 1 if group == WHOLE else -(-k // group)
    parts = {
        "qdata": pack_bits((kept & 15).to(torch.uint8).flatten(1), 4),
        "index": pack_bits(index.to(torch.uint8), 4),
        "scale": torch.rand(n, groups, generator=generator) + 0.5,
    }
    return parts, dense.flatten(1)[:, :k]


@pytest.mark.parametrize("group", [32, 64, 128, 256, 300, WHOLE])
@pytest.mark.parametrize("shape", [(130, 300), (1, 1), (128, 256), (5, 262)])
def test_and_back(shape, group):
    parts, _ = problem(shape, group)
    there = LAYOUT.from_canonical(parts, spec_of(group), shape, INT4)
    back = LAYOUT.to_canonical(there, spec_of(group), shape, INT4)
    assert back.keys() == parts.keys()
    assert all(torch.equal(back[name], part) for name, part in parts.items())


def test_where_each_code_lies():
    """By the words of the docstring, one group after the other."""
    parts, codes = problem((3, 500), WHOLE)
    words = LAYOUT.from_canonical(parts, spec_of(WHOLE), (3, 500), INT4)["qdata"].to(torch.int64)
    assert words.shape == (1, 2, 3, 128, 16)
    padded = F.pad(codes, (0, 12))
    for row, tile, u, q in ((0, 0, 0, 0), (1, 1, 3, 5), (2, 0, 6, 7), (2, 1, 7, 2), (0, 0, 5, 3)):
        h, w, r = u // 4, u // 2 % 2, u % 2
        word = words[0, tile, h, row, 2 * q + r]
        pattern = PATTERNS[int(words[0, tile, 2, row, 2 * q + r] >> 4 * (u // 2) & 7)]
        group = padded[row, tile * 256 + 32 * u + 4 * q :][:4]
        found = [int(word >> 4 * w & 15) - 8, int(word >> 8 + 4 * w & 15) - 8]
        wanted = torch.zeros(4, dtype=torch.int64)
        wanted[list(pattern)] = torch.tensor(found)
        assert torch.equal(wanted, group)


@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_every_code_and_pattern(element):
    """Each place of a pair of words holds every pattern with every two codes."""
    random = np.random.default_rng(0)
    count = 6 * 256
    patterns = np.stack([random.permutation(count) % 6 for _ in range(8)])
    codes = np.stack([random.permutation(count) // 6 for _ in range(8)])
    for u in range(8):  # both at once, for each place
        every = random.permutation(count)
        patterns[u], codes[u] = every % 6, every // 6
    first, second = codes & 15, codes >> 4
    inputs = np.zeros((3, count), np.uint32)
    for u in range(8):
        h, w, r = u // 4, u // 2 % 2, u % 2
        inputs[h] |= (first[u] << 16 * r + 4 * w | second[u] << 16 * r + 8 + 4 * w).astype(
            np.uint32
        )
        inputs[2] |= (patterns[u] << 16 * r + 4 * (u // 2)).astype(np.uint32)
    table = known(INT4, sparse=True).table().numpy().view(np.uint32)[16:]
    assert all(np.array_equal(table[8 * i : 8 * i + 8], table[:8]) for i in range(4))
    names = re.findall(r"ao_\w+", load_table().partition(";")[0])
    planes = run(two_of_four(element), *inputs, given=dict(zip(names, table[:8], strict=True)))
    dtype = ml_dtypes.bfloat16 if element == "bf16" else np.float16
    for u in range(8):
        wanted = np.zeros((count, 4))
        for number, (left, right) in enumerate(PATTERNS):
            wanted[patterns[u] == number, left] = first[u][patterns[u] == number] - 8.0
            wanted[patterns[u] == number, right] = second[u][patterns[u] == number] - 8.0
        both = np.stack([planes[2 * u], planes[2 * u + 1]], 1)
        assert np.array_equal(both.view(dtype).astype(float), wanted)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Spec("int8", (1, 64)), "not int8"),
        (Spec("nf4", (1, 64)), "not nf4"),
        (Spec("uint4", (1, 64), zero_point="int"), "not uint4"),
        (Spec("int4", (1, 64), zero_point="int"), "zero points"),
        (Spec("int4", (1, 16)), "needs groups of"),
    ],
)
def test_what_does_not_fit(spec, words):
    assert words in LAYOUT.refuses(spec, (64, 64), registry.dtypes.get(spec.dtype))


def test_calls():
    def call(m, dtype=torch.bfloat16):
        return Call("linear", spec_of(64), (256, 512), (m, 512), dtype, "cuda")

    assert LAYOUT.refuses(spec_of(64), (256, 512), INT4) is None
    assert LINEAR.refuses(call(512)) is None
    assert "found 513" in LINEAR.refuses(call(513))
    assert "float32" in LINEAR.refuses(call(1, torch.float32))
