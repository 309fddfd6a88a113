"""The launch tables by shape, with random weights: what fits is measured on this CPU, the rest computed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from benchmarking import Row, arguments, cell, record

NOT = "not measured"
INT8, INT4 = "int8_weight_only", "int4_weight_only"
DYNAMIC = "int8_dynamic_activation_int8_weight"


@dataclass(frozen=True)
class Entry:
    """A row: a shape, how it is quantized, and tokens that are in the cache already."""

    shape: str
    recipe: str | None = None
    kv: str | None = None
    context: int = 0
    #: whether it is run where its weights and cache fit; others take minutes for a step on two cores
    run: bool = False


TEXTS = (
    *(Entry("llama-2-7b", recipe) for recipe in (None, DYNAMIC, INT8, INT4)),
    *(Entry("llama-3-8b", recipe, run=recipe == INT4) for recipe in (None, DYNAMIC, INT8, INT4)),
    *(
        Entry("llama-3.1-8b", recipe, kv, context, run=kv == "kv4" and context == 131072)
        for recipe, kv in ((None, None), (None, "kv8"), (INT4, "kv8"), (INT4, "kv4"))
        for context in (8192, 32768, 131072)
    ),
    *(Entry("mixtral-8x7b", recipe) for recipe in (None, INT8, INT4)),
)
IMAGES = tuple(
    Entry(shape, recipe, run=shape in ("sam-vit-h", "sdxl-unet") and recipe in (None, DYNAMIC))
    for shape in ("sam-vit-h", "sdxl-unet", "flux-dev", "cogvideox-5b")
    for recipe in (None, DYNAMIC, INT8, INT4)
)
PROMPT, NEW = 8, 8

TEXT_OF_TEXTS = f"""\
`ao bench SHAPE` of the language models of torchao's launch, with random weights: {PROMPT} tokens of prompt
after *context* random keys and values, {NEW} new ones, one process after the other. *peak* is that of the
process, *of read rate* the share of the rate at which torch reads a large matrix. Other sizes than those that
are marked as computed were measured."""
TEXT_OF_IMAGES = """\
`ao bench SHAPE` of the models of torchao's launch that write no text, with random weights: one forward pass
at the sizes of the launch, for one picture (Segment Anything) or one step of one (SDXL and CogVideoX with
guidance, so two rows), one process after the other. *peak* is that of the process. Other sizes than those
that are marked as computed were measured."""


def child(entry: Entry) -> None:
    """Run one row, and print what was measured as JSON."""
    from ao_core import QTensor
    from ao_hf.generation import Pass, Workload, measure, measure_passes, pass_runner, runner_of
    from ao_hf.generation.presets import find_preset, random_model

    loaded = random_model(entry.shape, entry.recipe, device="cpu")
    forward = find_preset(entry.shape).forward
    parameters = list(loaded.model.parameters())
    weights = sum(p.stored_bytes if isinstance(p, QTensor) else p.nbytes for p in parameters)
    if forward is None:
        work = Workload(PROMPT, NEW, filled=entry.context)
        (text,) = measure({"this": runner_of(loaded, entry.kv)}, [work], rounds=3)
        found = {
            "cache": text.cache_bytes,
            "peak": text.peak_resident,
            "rate": text.decode_rate.median,
            "share": text.share_of_read.median,
        }
    else:
        runners = {"this": pass_runner(loaded, forward)}
        (image,) = measure_passes(runners, [Pass(forward.unit)], rounds=1)
        found = {
            "peak": image.peak_resident,
            "seconds": image.seconds.median,
        }
    print(json.dumps(found | {"weights": weights}))


def measured(entry: Entry, index: int, kind: str) -> dict[str, float]:
    """What a process of its own found."""
    print(f"{entry.shape}, {entry.recipe or 'bfloat16'}, {entry.context}", file=sys.stderr)
    command = [sys.executable, __file__, "--child", kind, str(index)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def size(found: dict[str, float], name: str, computed: int) -> str:
    """Measured, or computed and marked."""
    return cell(found[name] / 1e9) if name in found else f"{cell(computed / 1e9)} (computed)"


def row_of(entry: Entry, index: int, kind: str, run: bool) -> Row:
    """What is known of one row."""
    from ao_hf.generation.machine import free_memory
    from ao_hf.generation.presets import cache_bytes_of, find_preset, stored_bytes

    weights = stored_bytes(entry.shape, entry.recipe)
    text = find_preset(entry.shape).forward is None
    tokens = entry.context + PROMPT + NEW
    cache = cache_bytes_of(entry.shape, entry.kv, 1, tokens) if text else 0
    fits = weights + cache < 0.8 * free_memory()
    found = measured(entry, index, kind) if run and entry.run and fits else {}
    row: Row = {"shape": entry.shape, "weights in": entry.recipe or "bfloat16"}
    if text:
        row |= {"cache in": entry.kv or "bfloat16", "context": entry.context}
    row["weights GB"] = size(found, "weights", weights)
    if text:
        row["cache GB"] = size(found, "cache", cache)
    row["peak GB"] = cell(found["peak"] / 1e9) if found else NOT
    if text:
        row["CPU, tokens/s"] = cell(found["rate"]) if found else NOT
        row["of read rate"] = f"{found['share']:.0%}" if found else NOT
    else:
        row["CPU, s"] = cell(found["seconds"]) if found else NOT
    row["GPU"] = NOT
    return row


KINDS = {"texts": (TEXTS, TEXT_OF_TEXTS), "images": (IMAGES, TEXT_OF_IMAGES)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(KINDS[sys.argv[2]][0][int(sys.argv[3])])
    else:
        args = arguments(__doc__, kind="texts", run=1)
        entries, text = KINDS[args.kind]
        rows = [row_of(entry, i, args.kind, bool(args.run)) for i, entry in enumerate(entries)]
        record(args.json, f"The launch tables by shape: {args.kind}", text, rows)
