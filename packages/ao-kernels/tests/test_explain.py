"""What `explain` and the command line say of the kernels: which one serves, how, and why not the others."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from torch import nn

from ao_core import Spec, WeightOnlyConfig, explain, kernels, quantize_, quantize_tensor
from ao_core.ext import repack
from ao_core.testing.warm import run_python
from ao_kernels.cpu import library

INT8_ROWS = Spec("int8", (1, -1))


def winners(spec: Spec, *rows: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, str]]:
    """Name and description of the kernel that serves each number of rows."""
    w = repack(quantize_tensor(torch.ones(48, 64, dtype=dtype), spec))
    (weight,) = explain(w, rows=rows)
    found = [call.winner for call in weight.calls]
    return [("", "") if c is None else (c.kernel.name, c.description) for c in found]


def test_names_the_kernel_the_instruction_set_and_the_way() -> None:
    isa = library.isa()
    few, many = winners(Spec("int4", (1, 32), layout="packed"), 1, 8)  # too few for tiles
    assert few == ("cpu_tiles_linear", f"{isa}, weights decoded as they are read")
    assert many[0] == "cpu_tiles_linear"
    assert many[1] == f"{isa}, weights decoded into the cache, once for many rows"
    ((name, text),) = winners(Spec("int8", (1, -1), act=INT8_ROWS), 1)
    assert name == "cpu_tiles8_linear"
    assert text.endswith("activations as int8 per token")


@pytest.mark.parametrize(
    ("spec", "dtype", "least"),
    [
        (Spec("nf4", (1, 32), layout="packed"), torch.bfloat16, 4),
        (Spec("int8", (1, -1)), torch.bfloat16, 5),
        (Spec("int8", (1, -1)), torch.float16, 6),
        (Spec("int8", (1, -1)), torch.float32, 12),
        (Spec("int8", (1, -1), act=INT8_ROWS), torch.float32, 32),
        (Spec("int4", (1, 64), layout="packed", act=INT8_ROWS), torch.float32, 64),
        (Spec("int4", (1, 32), layout="packed", act=INT8_ROWS), torch.bfloat16, 48),
        (Spec("int4", (1, 32), layout="packed"), torch.float32, 12),
        (Spec("nf4", (1, 32), layout="packed"), torch.float32, None),  # from more rows on
    ],
    ids=str,
)
def test_tile_registers_serve_from_so_many_rows_on(
    spec: Spec, dtype: torch.dtype, least: int | None
) -> None:
    w = repack(quantize_tensor(torch.ones(48, 128, dtype=dtype), spec))
    (weight,) = explain(w, rows=tuple(range(1, 130)))
    winners = [call.winner for call in weight.calls]
    served = ["matmuls in tile registers" in c.description for c in winners if c is not None]
    there_are_any = library.isa() == "amx" and least is not None
    assert served == [there_are_any and rows >= (least or 0) for rows in range(1, 130)]


def test_text_says_it_and_who_else_would_serve() -> None:
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 48)).bfloat16()
    quantize_(model, WeightOnlyConfig("uint4", 32, "bfloat16", "int"))
    text = str(explain(model))
    line = r"→ cpu_tiles_linear \(ao-kernels, priority 50\): \w+, weights decoded as they are read"
    assert re.search(line, text)
    assert "reference_linear (ao-core, priority -100): would serve it too" in text


def test_says_why_it_does_not_serve() -> None:
    spec = Spec("int4", (1, 32), layout="packed")
    w = repack(quantize_tensor(torch.ones(48, 64), spec))
    x = torch.ones(3, 64, dtype=torch.float64)
    assert "cpu_tiles_linear (ao-kernels, priority 50): needs activations in float32" in str(
        explain(w, x)
    )
    with kernels("reference"):
        assert "the band is pinned to 'reference'" in str(explain(w))


def test_experts() -> None:
    spec = Spec("int4", (1, 32), layout="packed")
    w = repack(quantize_tensor(torch.ones(3, 48, 64), spec))
    assert f"{library.isa()}, expert by expert" in str(explain(w))


PROGRAM = """
import json, torch
from ao_core import Call, Spec
from ao_core.ext.kernels import candidates
spec = Spec("int4", (1, 32), layout="cpu_tiles")
for m in (1, 32, 512):
    call = Call("linear", spec, (48, 64), (m, 64), torch.float32, "cpu")
    print(json.dumps([(each.kernel.name, each.refusal) for each in candidates(call)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [("AO_CPU_LIBRARY", "nowhere.so", "there is no file nowhere.so"), ("AO_CPU_ISA", "mmx", "mmx")],
)
def test_says_why_the_library_does_not_serve(variable: str, value: str, reason: str) -> None:
    done = run_python("-c", PROGRAM, env={**os.environ, variable: value}, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for refusals in map(dict, map(json.loads, lines)):
        assert [name for name, refusal in refusals.items() if refusal is None] == [
            "reference_linear"
        ]
        assert reason in refusals["cpu_tiles_linear"]
