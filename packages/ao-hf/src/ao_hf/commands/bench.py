"""`ao bench`: how fast a model is as it is, quantized, and with quantized caches, side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ao_hf.commands.tables import Table
    from ao_hf.generation.presets import Forward

__all__ = ["bench"]

#: what a workload of text is where an option is not given
_PROMPTS, _NEW = "64,1024", 64


def bench(
    model: str = typer.Argument(
        metavar="MODEL",
        help="The folder of a model, dense or quantized by ao, a GGUF file, ORG/NAME of the Hub, or the name "
        "of a known shape, which gets random weights: llama-3-8b, sdxl-unet, …",
    ),
    recipe: list[str] = typer.Option(
        [], help="Measure the model quantized by this recipe; repeatable."
    ),
    kv: list[str] = typer.Option(
        [], help="Measure each with this recipe of caches, too; repeatable."
    ),
    prompt_lengths: str | None = typer.Option(
        None, help=f"Tokens of the prompts. [default: {_PROMPTS}]"
    ),
    contexts: str | None = typer.Option(
        None,
        help="Tokens that are in the cache before the prompt, with random keys and values. [default: none]",
    ),
    new_tokens: int | None = typer.Option(
        None, min=2, help=f"Tokens that are generated. [default: {_NEW}]"
    ),
    batches: str = typer.Option("1", help="Prompts or pictures at once."),
    ragged: bool = typer.Option(
        False, "--ragged", help="Batches of prompts of different lengths, too."
    ),
    rounds: int = typer.Option(5, min=1, help="In each round all contenders take their turn."),
    device: str | None = typer.Option(
        None, help="cpu, cuda, … [default: the accelerator, if there is one]"
    ),
    dtype: str = typer.Option("bfloat16", help="Of activations: float32, bfloat16 or float16."),
    json: Path | None = typer.Option(
        None, help="Write the results there, with machine and versions."
    ),
    markdown: Path | None = typer.Option(None, help="Write the tables there."),
) -> None:
    """Time to first token, prefill and decoding, beside the dense model in bfloat16, which always runs.

    A model that writes no text, as one that draws, is measured by its forward pass. Figures are medians over
    rounds, with the quarter and three quarters of them. Each contender is a process of its own, whose peak
    memory is shown. Bytes per token are weights and cache that are read for it, and the share is of the rate
    at which torch reads a large matrix in the same round. Of a shape that does not fit into memory the sizes
    are computed.
    """
    from ao_hf.commands.quiet import quiet
    from ao_hf.commands.results import check_files, numbers, write_json

    check_files(json=json, markdown=markdown)
    sizes = numbers("--batches", batches)
    with quiet():
        from ao_hf import generation
        from ao_hf.commands.contenders import named_preset, of_folder, of_preset, planned, started
        from ao_hf.commands.tables import PASSES, TEXTS
        from ao_hf.generation.caches import check_kv
        from ao_hf.generation.machine import about
        from ao_hf.generation.models import check_recipe, device_of, folder_of
        from ao_hf.generation.passes import Pass, measure_passes

        for name in kv:
            check_kv(name)
        place, preset = str(device_of(device)), named_preset(model)
        forward = None if preset is None else preset.forward
        measure: Any
        workloads: list[Any]
        if forward is None:
            table, measure = TEXTS, generation.measure
            workloads = [
                generation.Workload(length, new_tokens or _NEW, size, uneven, filled)
                for filled in ([0] if contexts is None else numbers("--contexts", contexts))
                for length in numbers("--prompt-lengths", prompt_lengths or _PROMPTS)
                for size in sizes
                for uneven in ([False, True] if ragged and size > 1 else [False])
            ]
        else:
            table, measure = PASSES, measure_passes
            _check_pass(model, forward, kv=kv, prompt_lengths=prompt_lengths, contexts=contexts,
                        new_tokens=new_tokens, ragged=ragged)  # fmt: skip
            workloads = [Pass(forward.unit, size) for size in sizes]
        if preset is None:
            folder = folder_of(model)
            for name in recipe:
                check_recipe(name, folder)
            contenders = of_folder(folder, recipe, kv, place, dtype)
        else:
            contenders = of_preset(model, recipe, kv, place, dtype)
        plan = planned(contenders, workloads, place)
        rows: list[Any] = []
        with ExitStack() as stack:
            runners = started(plan.loaded, stack)
            for workload, names in plan.runs.items():
                if names:
                    rows += measure(
                        {name: runners[name] for name in names},
                        [workload],
                        rounds=rounds,
                        device=place,
                        progress=sys.stderr.isatty(),
                    )
    _show(table, workloads, rows, plan.missing, markdown)
    if json is not None:
        write_json(
            json,
            {
                "about": about(place),
                "model": model,
                "rows": [asdict(row) for row in rows],
                "not_measured": [asdict(row) for row in plan.missing],
            },
        )


def _check_pass(model: str, forward: Forward, **options: Any) -> None:
    """Raise where an option is of generated text."""
    from ao_core.ext import ConfigError

    for name, value in options.items():
        if value:
            raise ConfigError(
                f"--{name.replace('_', '-')}: {model} generates no text; what is measured is a forward pass "
                f"for one {forward.unit}, so leave it out"
            )


def _show(
    table: Table,
    workloads: Sequence[Any],
    rows: Sequence[Any],
    missing: Sequence[Any],
    path: Path | None,
) -> None:
    from ao_core.ext.cli import show_table
    from ao_hf.commands.results import markdown
    from ao_hf.commands.tables import table_of

    texts = []
    for workload in workloads:
        found = [[row for row in each if row.workload == workload] for each in (rows, missing)]
        header, cells = table_of(table, *found)
        show_table(str(workload), header, cells, right=range(1, len(header)))
        texts.append(f"**{workload}**\n\n{markdown(header, cells)}")
    if path is not None:
        path.write_text("\n".join(texts), encoding="utf-8")
