"""Convert weights of every family to every format, and write the verdicts into docs/interchange.md.

With --check nothing is written, and the exit status says whether the page is fresh.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

import torch

from ao_core import QTensor, Spec, quantize_tensor
from ao_core.ext import registry
from ao_core.ext.interchange import ForeignWeight, Interchange, Source, flatten
from ao_quant.interchange import formats
from ao_quant.interchange.one import convert_weight
from ao_quant.interchange.verdicts import BYTES, REFUSED, VALUES, Verdict
from doc_sections import main, project_plugins, table
from workspace import ROOT

PAGE = ROOT / "docs" / "interchange.md"
LOSSLESS = ROOT / "packages/ao-quant/tests/interchange/lossless.py"
PERPLEXITY = ROOT / "examples/smollm2/perplexity.json"
MUTATIONS = ROOT / "packages/ao-quant/tests/interchange/mutations.json"
SHAPE = (64, 256)
NVFP4 = Spec("f4e2m1", (1, 16), Spec("f8e4m3", (-1, -1)), layout="packed")
#: what a weight is first -> its format
SOURCES = {
    "int4, groups of 64, float16 scales": Spec("int4", (1, 64), "float16", layout="packed"),
    "uint4 with zero points, groups of 64, float16 scales": Spec(
        "uint4", (1, 64), "float16", "int", "packed"
    ),
    "uint4 with zero points, groups of 32, bfloat16 scales": Spec(
        "uint4", (1, 32), "bfloat16", "int", "packed"
    ),
    "uint3 with zero points, groups of 64, float16 scales": Spec(
        "uint3", (1, 64), "float16", "int", "packed"
    ),
    "int8, one float32 scale per row": Spec("int8", (1, -1)),
    "NF4, blocks of 64, float32 scales": Spec("nf4", (1, 64), layout="packed"),
    "FP8, one scale per row": Spec("f8e4m3", (1, -1)),
    "FP8, blocks of 128 × 128": Spec("f8e4m3", (128, 128)),
    "MXFP4": Spec("f4e2m1", (1, 32), "e8m0", layout="packed"),
    "MXFP8": Spec("f8e4m3", (1, 32), "e8m0"),
    "NVFP4": NVFP4,
}
SHORT = {BYTES: "bytes", VALUES: "values", REFUSED: "refused"}


def weight(spec: Spec) -> QTensor:
    """The weight that is converted."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    return quantize_tensor(x.half(), spec)


def read(form: Interchange, tensor: QTensor) -> tuple[ForeignWeight, Source]:
    """The weight as it is in a file of a format."""
    written = form.write("m.weight", tensor, {})
    settings = {"m.weight": written.settings}
    forms = {name: (t.dtype, tuple(t.shape)) for name, t in written.tensors.items()}
    source = Source(
        forms,
        dict(written.tensors).__getitem__,
        {"dtype": "float16"},
        form.config(settings, ()),
        form.metadata(settings),
    )
    return form.read(source).weights["m.weight"], source


def cell(verdict: Verdict) -> str:
    """One word, or the error in decibels."""
    return SHORT.get(verdict.verdict) or f"{verdict.sqnr:.0f} dB"


def from_ao(tensor: QTensor, form: Interchange) -> Verdict:
    """The verdict on a weight of ao in a format."""
    leaves, _ = flatten("m.weight", tensor)
    own = ForeignWeight(tuple(leaves), lambda: tensor)
    return convert_weight("m.weight", own, leaves.__getitem__, None, form).verdict


def by_family() -> str:
    """What becomes of each family of weights in each format."""
    known = [form for name, form in formats().items() if name != "mxfp4"]
    rows = [
        [title, *(cell(from_ao(weight(spec), form)) for form in known)]
        for title, spec in SOURCES.items()
    ]
    return table(("weight", *(f"`{form.name}`" for form in known)), rows)


def between() -> str:
    """What becomes of integers of 4 bits with zero points on the way from one format to another."""
    names = (
        "gptq",
        "gptq_v2",
        "awq",
        "awq_gemv",
        "awq_gemv_fast",
        "compressed-tensors",
        "hqq",
        "torchao",
        "mlx",
    )
    rows = []
    for one in names:
        form = registry.interchange.get(one)
        found, source = read(
            form, weight(SOURCES["uint4 with zero points, groups of 64, float16 scales"])
        )
        cells = []
        for other in names:
            target = registry.interchange.get(other)
            verdict = convert_weight("m.weight", found, source.take, form, target).verdict
            cells.append(cell(verdict))
        rows.append([f"`{one}`", *cells])
    return table(("from ↓ to →", *(f"`{name}`" for name in names)), rows)


def lossless() -> str:
    """Cases with what is expected of them, which tests hold; conversions that are alike share a row."""
    found = runpy.run_path(str(LOSSLESS))
    rows: dict[tuple[str, ...], list[str]] = {}
    for case in found["CASES"]:
        key = (case.what, cell(found["verdict_on"](case)), case.correction or "–")
        rows.setdefault(key, []).append(f"`{case.source}` → `{case.target}`")
    cells = [[what, ", ".join(ways), told, why] for (what, told, why), ways in rows.items()]
    return table(("what", "from → to", "verdict", "why not as elsewhere"), cells)


def perplexity() -> str:
    """SmolLM2 in llama.cpp and in ao, from the committed measurement."""
    data = json.loads(PERPLEXITY.read_text(encoding="utf-8"))
    rows = []
    for row in data["rows"]:
        dense = row["llama.cpp, float32"] / row["dense"] - 1
        blocks = row["llama.cpp"] / row["rounded"] - 1
        numbers = (row["dense"], row["llama.cpp, float32"], row["rounded"], row["llama.cpp"])
        cells = [f"{number:.4f}" for number in numbers]
        nudge = row["rounded, nudged"] / row["rounded"] - 1
        told = [f"{blocks:+.2%}", f"{nudge:+.2%}", f"{row['deviation']:.2%}"]
        rows.append([row["recipe"], *cells[:2], f"{dense:+.3%}", *cells[2:], *told])
    return table(
        (
            "weights",
            "ao",
            "llama.cpp, the values in float32",
            "difference",
            "ao, inputs rounded to int8",
            "llama.cpp, the codes",
            "difference",
            "ao nudged: difference",
            "deviation",
        ),
        rows,
    )


def damaged() -> str:
    """Damaged checkpoints of each format, from the committed run."""
    data = json.loads(MUTATIONS.read_text(encoding="utf-8"))
    rows = [
        [f"`{name}`", f"{run['read']:,}", f"{run['error']:,}", f"{run['grown_mb']}"]
        for name, run in sorted(data.items())
    ]
    return table(("format", "read", "refused with an error", "memory grown, MB"), rows)


def listed() -> str:
    """The formats."""
    return table(("name", "what"), [[f"`{name}`", form.doc] for name, form in formats().items()])


if __name__ == "__main__":
    os.environ["AO_PLUGINS"] = project_plugins()
    sections = {
        (PAGE, "formats"): listed(),
        (PAGE, "families"): by_family(),
        (PAGE, "between"): between(),
        (PAGE, "lossless"): lossless(),
        (PAGE, "perplexity"): perplexity(),
        (PAGE, "damaged"): damaged(),
    }
    sys.exit(main(sections, "generate_interchange.py"))
