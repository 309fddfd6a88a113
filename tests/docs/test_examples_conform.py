"""What the documentation shows (layouts, a kernel, …) passes the suites that it tells one to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ao_core import Algorithm, Kernel, Spec, Transform
from ao_core.testing import AlgorithmSuite, KernelSuite, LayoutSuite, ScaleSuite, TransformSuite
from run_docs import BLOCK

DOCS = Path(__file__).parents[2] / "docs"

UINT4 = (Spec("uint4", (1, 32), "bfloat16", zero_point="int"),)


def example(name: str) -> dict[str, Any]:
    """What a file of docs/examples defines before it uses it, nothing of which is registered yet."""
    text = (DOCS / "examples" / name).read_text("utf-8").partition("# --8<-- [start:use]")[0]
    scope: dict[str, Any] = {"__name__": __name__}  # of a module, as dataclasses want it
    exec(compile(text, name, "exec"), scope)
    return scope


def shown(page: str, word: str) -> dict[str, Any]:
    """What the block of a page that has this word defines."""
    blocks = [m["text"] for m in BLOCK.finditer((DOCS / page).read_text("utf-8"))]
    (text,) = [block for block in blocks if word in block]
    scope: dict[str, Any] = {"Spec": Spec, "torch": torch}
    exec(text, scope)
    return scope


def defined(page: str, *words: str) -> dict[str, Any]:
    """What the blocks of a page that have these words define, before they register it."""
    blocks = [m["text"] for m in BLOCK.finditer((DOCS / page).read_text("utf-8"))]
    scope: dict[str, Any] = {"Spec": Spec, "torch": torch}
    for word in words:
        (text,) = [block for block in blocks if word in block]
        exec(text.partition("reopen()  #")[0].partition("\nreopen()\n")[0], scope)
    return scope


BY_COLUMNS = defined(
    "extending/index.md", "class ColumnMajor", "def by_columns", "def scaled_by_columns"
)
COLUMN_MAJOR = BY_COLUMNS["ColumnMajor"]()


class TestColumnMajor(LayoutSuite):
    records = (COLUMN_MAJOR,)
    layout = "column_major"
    specs = (Spec("int8", (1, -1)),)


class TestByColumns(KernelSuite):
    records = (
        COLUMN_MAJOR,
        Kernel(
            *("by_columns", "linear", "column_major", "*", BY_COLUMNS["by_columns"], 1),
            refuses=BY_COLUMNS["refuses"],
        ),
    )
    kernel = "by_columns"


class TestScaledByColumns(KernelSuite):
    records = (
        COLUMN_MAJOR,
        Kernel(
            *(
                "scaled_by_columns",
                "linear",
                "column_major",
                "*",
                BY_COLUMNS["scaled_by_columns"],
                2,
            ),
            refuses=BY_COLUMNS["refuses"],
            fuses=("scale",),
        ),
    )
    kernel = "scaled_by_columns"


HALVES = example("own_layout.py")
LAYOUTS = (HALVES["Halves"](), HALVES["HalvesByColumn"]())


class TestHalves(LayoutSuite):
    records = LAYOUTS
    layout = "halves"
    specs = UINT4


class TestHalvesByColumn(LayoutSuite):
    records = LAYOUTS
    layout = "halves_by_column"
    specs = UINT4


class TestOutlierColumns(LayoutSuite):
    records = (example("own_outliers.py")["OutlierColumns"](),)
    layout = "outlier_columns"
    specs = (Spec("nf4", (1, 32), "bfloat16"),)


class TestRowBlocks(KernelSuite):
    records = (example("own_kernel.py")["ROW_BLOCKS"],)
    kernel = "row_blocks"
    shapes = ((300, 64), (257, 70))


LOW_RANK = example("own_op.py")


class TestLowRankReference(KernelSuite):
    records = (LOW_RANK["LOW_RANK"],)
    kernel = "reference_low_rank_linear"
    rtol = 2e-2


class TestLowRankCodes(KernelSuite):
    records = (LOW_RANK["LOW_RANK"], LOW_RANK["CODES"])
    kernel = "low_rank_codes"


class TestScaledRows(KernelSuite):
    records = (example("own_fused_step.py")["SCALED_ROWS"],)
    kernel = "scaled_rows"


SEARCHED = example("own_transform.py")


class TestSearched(TransformSuite):
    records = (Transform(SEARCHED["Int4SearchedConfig"], "int4_searched", 1, SEARCHED["apply"]),)
    config = SEARCHED["Int4SearchedConfig"](group_size=32)


CLIPPED = example("own_algorithm.py")


def needs(config: Any) -> tuple[Any, ...]:
    return (CLIPPED["SQUARES"],)


class TestClipped(AlgorithmSuite):
    records = (Algorithm("clipped", CLIPPED["ClippedInt4Config"], needs, CLIPPED["clip"]),)
    config = CLIPPED["ClippedInt4Config"](steps=4)


class TestHalf(shown("extending/conformance.md", "class TestHalf")["TestHalf"]):  # type: ignore[misc]
    pass


class TestThreeQuarters(ScaleSuite):
    records = (shown("scales.md", "def three_quarters")["METHOD"],)
    scale_method = "three_quarters"
    sqnr_loss = 15.0  # it clips a quarter of every range
    specs = (
        Spec("int3", (1, 32), "bfloat16"),
        Spec("uint4", (1, 32), "float16", zero_point="int"),
        Spec("f4e2m1", (1, 32), "e8m0"),
        Spec("int4", (1, 32), Spec("int8", (1, -1))),
    )
