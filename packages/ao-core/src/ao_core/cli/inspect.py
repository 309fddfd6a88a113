"""`ao inspect`: what a checkpoint holds, read from its headers alone."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ao_core.cli.output import JSON, show_json, show_table

if TYPE_CHECKING:
    from ao_core.spec import Spec
    from ao_core.tensor.saving import Checkpoint

__all__ = ["inspect"]


def inspect(
    checkpoint: Path = typer.Argument(
        help="A directory, an index, one safetensors file, or (with ao-hf) ORG/NAME of the Hub."
    ),
    as_json: bool = JSON,
) -> None:
    """Show every tensor of a checkpoint: shape, format, bytes, bits per weight, provider; and totals."""
    from ao_core.checkpoints.folders import find
    from ao_core.report.text import shape_text, size_text
    from ao_core.tensor.saving import open_checkpoint

    opened = open_checkpoint(find(checkpoint))
    rows = _rows(opened)
    count = sum(row["elements"] for row in rows)
    dense = sum(row["bytes_dense"] for row in rows)
    missing = opened.missing_providers()
    if as_json:
        totals = {
            "bytes": opened.nbytes,
            "bytes_dense": dense,
            "elements": count,
            "bits_per_weight": _bits(opened.nbytes, count),
            "coverage_percent": _coverage(rows),
        }
        files = [file.name for file in opened.files]
        show_json(
            {
                "files": files,
                "tensors": rows,
                "formats": _formats(rows),
                "tied": opened.ties,
                "totals": totals,
                "missing": missing,
            }
        )
        return
    show_table(
        f"{checkpoint}",
        ("name", "shape", "format", "size", "bits/weight", "provider"),
        [
            (
                " = ".join((row["name"], *row["tied"])),
                shape_text(row["shape"]),
                row["format"],
                size_text(row["bytes"]),
                f"{row['bits_per_weight']:.2f}",
                ", ".join(row["providers"]),
            )
            for row in rows
        ],
        right=(3, 4),
    )
    show_table(
        "by format",
        ("format", "tensors", "size", "of all", "bits/weight"),
        [
            (
                kind["format"],
                str(kind["tensors"]),
                size_text(kind["bytes"]),
                f"{100 * kind['bytes'] / max(opened.nbytes, 1):.1f}%",
                f"{kind['bits_per_weight']:.2f}",
            )
            for kind in _formats(rows)
        ],
        right=(1, 2, 3, 4),
    )
    quantized = sum(row["spec"] is not None for row in rows)
    total = (
        f"{len(rows)} tensors, {quantized} quantized, in {len(opened.files)} file(s): "
        f"{size_text(opened.nbytes)}, {_bits(opened.nbytes, count):.2f} bits per weight "
        f"({size_text(dense)} if all were dense, {_coverage(rows):.1f}% of it quantized)"
    )
    typer.echo(total)
    for text in missing:
        typer.echo(f"missing here: {text}")


def _rows(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    from ao_core.registry import CORE
    from ao_core.tensor.saving.write import natural

    dists = {(p.kind, p.name): f"{p.dist} {p.version}".strip() for p in checkpoint.providers}
    tied: dict[str, list[str]] = {}
    for name, owner in checkpoint.ties.items():
        tied.setdefault(owner, []).append(name)
    rows = []
    for entry in sorted(checkpoint.entries.values(), key=lambda entry: natural(entry.fqn)):
        count = prod(entry.shape)
        needs = () if entry.spec is None else tuple(_names(entry.spec))
        rows.append(
            {
                "name": entry.fqn,
                "tied": tied.get(entry.fqn, []),
                "shape": list(entry.shape),
                "dtype": str(entry.dtype).removeprefix("torch."),
                "format": str(entry.dtype).removeprefix("torch.")
                if entry.spec is None
                else str(entry.spec),
                "spec": None if entry.spec is None else entry.spec.to_dict(),
                "bytes": entry.nbytes,
                "bytes_dense": count * entry.dtype.itemsize,
                "elements": count,
                "bits_per_weight": _bits(entry.nbytes, count),
                "providers": sorted({dists.get(need, CORE) for need in needs}),
            }
        )
    return rows


def _names(spec: Spec) -> Iterator[tuple[str, str]]:
    """Kind and name of all that a spec needs, its nested specs included."""
    yield "dtype", spec.dtype
    yield "layout", spec.layout
    for nested in (spec.scale_dtype, spec.act):
        if nested is not None and not isinstance(nested, str):
            yield from _names(nested)


def _formats(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tensors and bytes of each format, the largest first."""
    kinds: dict[str, dict[str, Any]] = {}
    for row in rows:
        empty = {"format": row["format"], "tensors": 0, "bytes": 0, "elements": 0}
        kind = kinds.setdefault(row["format"], empty)
        kind["tensors"] += 1
        kind["bytes"] += row["bytes"]
        kind["elements"] += row["elements"]
    for kind in kinds.values():
        kind["bits_per_weight"] = _bits(kind["bytes"], kind["elements"])
    return sorted(kinds.values(), key=lambda kind: (-kind["bytes"], kind["format"]))


def _coverage(rows: list[dict[str, Any]]) -> float:
    """Share of the bytes of dense tensors that is quantized, in percent."""
    covered: int = sum(row["bytes_dense"] for row in rows if row["spec"] is not None)
    dense: int = sum(row["bytes_dense"] for row in rows)
    return 100.0 * covered / max(dense, 1)


def _bits(nbytes: int, count: int) -> float:
    return 8 * nbytes / max(count, 1)
