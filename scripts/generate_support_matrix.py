"""Write the tables of recipes, formats and kernels into the documentation, from the registry.

With --check nothing is written, and the exit status says whether the pages are fresh. Tables do not
depend on the machine: whether a kernel is available on it is not asked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path

import torch
from torch import nn

from ao_core import (
    WHOLE,
    Call,
    DType,
    FqnToConfig,
    Kernel,
    Layout,
    QTensor,
    Recipe,
    Spec,
    quantize_,
)
from ao_core.ext import NO_SCALE, STOCHASTIC, AoError, registry
from ao_core.ext.kernels import BANDS
from doc_sections import main, project_plugins, table
from workspace import ROOT

RECIPES, MATRIX = ROOT / "docs" / "recipes.md", ROOT / "docs" / "support-matrix.md"
#: rows of activations that stand for a decoding step, a small and a large batch
BATCHES = (1, 32, 512)
SHAPE = (1024, 1024)
YES, NO = "yes", "–"


class Lookup(nn.Module):
    """A module whose parameter is none that ao knows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 64))


class Experts(nn.Module):
    """Fused weights of experts: (experts, out, in)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 64, 64))


#: what a recipe is tried on; an embedding and an unknown parameter are named, as a user would have to
LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Linear": (lambda: nn.Linear(64, 64, bias=False), "*"),
    "Conv1d, 2d, 3d": (lambda: nn.Conv2d(64, 64, 3, bias=False), "*"),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(64, 2, bias=False), "*"),
    "3-D experts": (Experts, "*"),
    "Embedding, named": (lambda: nn.Embedding(64, 64), "weight"),
    "others, named": (Lookup, "table"),
}


def recipes_by_kind() -> tuple[list[Recipe], list[Recipe]]:
    """Recipes that store weights in low precision, and those that compute in it."""
    stored: list[Recipe] = []
    computed: list[Recipe] = []
    for recipe in registry.recipes.values():
        (stored if isinstance(weight_of(recipe), QTensor) else computed).append(recipe)
    return stored, computed


@cache
def weight_of(recipe: Recipe, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The weight of a linear layer under a recipe."""
    layer = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=dtype, device="meta")
    layer.weight = nn.Parameter(torch.ones(SHAPE, dtype=dtype))
    quantize_(layer, recipe.config)
    return layer.weight


def recipe_rows(recipes: list[Recipe]) -> list[list[str]]:
    """One row for each recipe; those that store have a column for their bytes."""
    rows = []
    for recipe in recipes:
        weight = weight_of(recipe)
        row = [f"`{recipe.name}`", recipe.summary, f"`{recipe.config!r}`"]
        if isinstance(weight, QTensor):
            row.insert(2, f"{weight.stored_bytes / weight.numel():.3f}")
        rows.append([*row, registry.recipes.provider(recipe.name)])
    return rows


def recipe_tables() -> dict[tuple[Path, str], str]:
    """The sections of the page on recipes."""
    stored, computed = recipes_by_kind()
    with_bytes = ("recipe", "what", "bytes per weight", "configuration", "package")
    without = ("recipe", "what", "configuration", "package")
    return {
        (RECIPES, "storage recipes"): table(with_bytes, recipe_rows(stored)),
        (RECIPES, "compute recipes"): table(without, recipe_rows(computed)),
    }


def holds(layout: Layout, dtype: DType) -> bool:
    """Whether a layout holds a weight matrix in a format, in some way of sharing scales."""
    blocks = ((1, WHOLE), (1, 32), (32,))
    zeros = ("none", "int") if dtype.kind == "int" else ("none",)
    scale = "bfloat16" if dtype.has_scale else NO_SCALE
    specs = [
        Spec(dtype.name, block, scale, zero_point, layout.name)
        for block in blocks
        for zero_point in zeros
    ]
    return any(layout.refuses(spec, SHAPE, dtype) is None for spec in specs)


def format_table() -> str:
    """Number formats, and the layouts that hold them."""
    layouts = registry.layouts.values()
    header = ["format", "bits", "kind", "least … greatest", *(f"`{la.name}`" for la in layouts)]
    rows = [
        [
            f"`{name}`",
            str(dtype.bits),
            dtype.kind,
            f"{dtype.min:g} … {dtype.max:g}",
            *(YES if holds(layout, dtype) else NO for layout in layouts),
        ]
        for name, dtype in registry.dtypes.items()
    ]
    return table(header, rows)


def layout_table() -> str:
    """Layouts, and what their classes say of themselves."""
    rows = [
        [
            f"`{name}`",
            first_line(layout.__doc__),
            YES if layout.canonical else f"as `{layout.canonical_name}`",
            ", ".join(layout.auto_devices) or NO,
        ]
        for name, layout in registry.layouts.items()
    ]
    return table(("layout", "parts", "in checkpoints", "chosen by itself on"), rows)


def kernel_table() -> str:
    """Kernels, and what their functions say of themselves."""
    rows = [
        [
            f"`{kernel.name}`",
            kernel.op,
            any_of(kernel.layout),
            any_of(kernel.device),
            band(kernel),
            first_line(getattr(kernel.fn, "_init_fn", kernel.fn).__doc__),  # of custom ops
        ]
        for kernel in sorted(registry.kernels.values(), key=lambda k: (k.op, -k.priority, k.name))
    ]
    return table(("kernel", "op", "layout", "device", "band", "what"), rows)


def any_of(name: str) -> str:
    """The name of a layout or device, as a kernel declares it."""
    return "any" if name == "*" else f"`{name}`"


def band(kernel: Kernel) -> str:
    """The name of the band that a kernel's priority lies in."""
    return max((floor, name) for name, floor in BANDS.items() if kernel.priority >= floor)[1]


def first_line(doc: str | None) -> str:
    """The first line of a docstring."""
    return (doc or "").strip().partition("\n")[0]


def serving(spec: Spec, device: str, dtype: torch.dtype) -> str:
    """The kernels of a linear layer, with those of `BATCHES` that each serves if there are several."""
    names = {m: winner(Call("linear", spec, SHAPE, (m, SHAPE[1]), dtype, device)) for m in BATCHES}
    runs = [(name, list(ms)) for name, ms in groupby(BATCHES, key=names.__getitem__)]
    if len(runs) == 1:
        return f"`{runs[0][0]}`"
    return ", ".join(f"`{name}` ({', '.join(map(str, ms))})" for name, ms in runs)


def winner(call: Call) -> str:
    """The kernel that serves a call on a machine where all are available."""
    found = [
        kernel
        for kernel in registry.kernels.values()
        if kernel.op == call.op
        and kernel.layout in ("*", call.spec.layout)
        and kernel.device in ("*", call.device)
        and kernel.refuses(call) is None
    ]
    return min(found, key=lambda kernel: (-kernel.priority, kernel.name)).name


def native_spec(spec: Spec, device: str, dtype: torch.dtype) -> Spec:
    """The spec in the layout that `quantize_` would choose on a device."""
    best, priority = spec, None
    if STOCHASTIC in spec.options:  # a weight that is trained stays as it is
        return best
    for layout in registry.layouts.values():
        other = replace(spec, layout=layout.name)
        if layout.canonical or layout.canonical_of(other, dtype_of(spec)) != spec.layout:
            continue
        if device not in layout.auto_devices or layout.refuses(other, SHAPE, dtype_of(spec)):
            continue
        if priority is None:
            priority = rank(spec, device, dtype)
        if rank(other, device, dtype) > priority:
            best, priority = other, rank(other, device, dtype)
    return best


def rank(spec: Spec, device: str, dtype: torch.dtype) -> int:
    """The priority of the kernel that serves one row of activations."""
    name = winner(Call("linear", spec, SHAPE, (1, SHAPE[1]), dtype, device))
    return registry.kernels.get(name).priority


def dtype_of(spec: Spec) -> DType:
    """The number format of a spec."""
    return registry.dtypes.get(spec.dtype)


def device_table() -> str:
    """Which kernels serve the weights of each recipe."""
    columns = [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16)]
    names = {"cpu": "CPU", "cuda": "CUDA"}
    header = ["recipe", *(f"{names[d]}, {str(t).removeprefix('torch.')}" for d, t in columns)]
    rows = []
    for recipe in recipes_by_kind()[0]:
        cells = []
        for device, dtype in columns:
            weight = weight_of(recipe, dtype)
            assert isinstance(weight, QTensor)
            spec = native_spec(weight.canonical().spec, device, dtype)
            cells.append(f"{serving(spec, device, dtype)}; `{spec.layout}`")
        rows.append([f"`{recipe.name}`", *cells])
    return table(header, rows)


def layer_table() -> str:
    """Which layers each recipe quantizes, and reasons why not."""
    rows = []
    notes: dict[tuple[str, str], str] = {}
    for recipe in registry.recipes.values():
        cells = []
        for name, (make, key) in LAYERS.items():
            status, reason = outcome(make(), key, recipe)
            cells.append(YES if status == "changed" else NO)
            if status != "changed":
                notes.setdefault((name, reason.partition(",")[0]), f"{name}: {reason}")
        rows.append([f"`{recipe.name}`", *cells])
    lines = [
        table(["recipe", *LAYERS], rows),
        "",
        "Reasons, as the report has them, for example:",
        "",
    ]
    return "\n".join([*lines, *(f"- {note}" for note in notes.values())])


def outcome(module: nn.Module, key: str, recipe: Recipe) -> tuple[str, str]:
    """What becomes of the weight of a module: the status in the report, and the reason."""
    try:
        (record, *_) = quantize_(module, FqnToConfig({key: recipe.config}))
    except AoError as error:
        return "error", str(error)
    return record.status, record.reason


def sections() -> dict[tuple[Path, str], str]:
    """All generated sections of both pages."""
    return {
        **recipe_tables(),
        (MATRIX, "formats"): format_table(),
        (MATRIX, "layouts"): layout_table(),
        (MATRIX, "devices"): device_table(),
        (MATRIX, "kernels"): kernel_table(),
        (MATRIX, "layers"): layer_table(),
    }


if __name__ == "__main__":
    os.environ["AO_PLUGINS"] = project_plugins()
    sys.exit(main(sections(), Path(__file__).name))
