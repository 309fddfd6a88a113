"""Perplexity of SmolLM2 by llama.cpp, from files that ao writes, next to ao's own through the same codes.

    nox -s perplexity                                          # builds llama-perplexity, and goes on
    python examples/smollm2/perplexity.py --programs build/perplexity/bin

The folder of each recipe becomes a GGUF file. llama.cpp reads it and takes the perplexity of a text, of the
second half of each window, as its own program does. ao takes that of the same tokens from the folder. With
`--json` it goes on with the recipes that the file has not yet.

Values in float32 give the same perplexity to five digits, so a few windows are enough for them. The kernels
of llama.cpp round the inputs of quantized weights to int8. From the first code on that falls the other way,
because a sum was taken in another order, all later ones differ at random: two runs of ao whose inputs differ
by a millionth are as far from each other as ao is from llama.cpp. So both are compared on more windows, next
to what such a nudge does.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from math import exp
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from smollm2 import evaluate, model
from torch import Tensor, nn

from ao_core import Config, QTensor, WeightOnlyConfig, dequantize_, quantize_checkpoint
from ao_quant import GGUFWeightOnlyConfig, MXWeightOnlyConfig
from ao_quant.interchange import convert_checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "minilm"))
from minilm_demo import results

#: what is quantized with, of which GGUF has the values
RECIPES: dict[str, Config | None] = {
    "as the file is (Q4_1)": None,
    "q8_0": GGUFWeightOnlyConfig("q8_0"),
    "q4_0": GGUFWeightOnlyConfig("q4_0"),
    "int4, groups of 64, float16 scales": WeightOnlyConfig("int4", 64, "float16"),
    "mxfp4": MXWeightOnlyConfig(),
}


def rounded(x: Tensor) -> Tensor:
    """Activations as llama.cpp's kernels of blocks take them: int8 in groups of 32, float16 scales."""
    groups = x.unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    codes = (groups * torch.where(scale > 0, 1 / scale, 0.0)).round()
    values: Tensor = codes * scale.half().float()
    return values.flatten(-2)


def nudged(x: Tensor) -> Tensor:
    """`x`, each element moved by about a millionth of itself, as another order of sums does."""
    return x * (1 + 1e-6 * torch.randn_like(x))


def losses(
    folder: Path,
    windows: Tensor,
    *,
    dense: bool = False,
    inputs: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """-log p of the second half of each window (count, n), which llama.cpp takes the perplexity of.

    Args:
        folder: of transformers, quantized by ao.
        windows: tokens.
        dense: with the weights dequantized, by torch alone; else by the kernels of ao.
        inputs: what becomes of activations before quantized weights.
    """
    import transformers

    found: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for module in found.modules():
        if inputs and isinstance(module, nn.Linear) and isinstance(module.weight, QTensor):
            module.register_forward_pre_hook(lambda _, given: (inputs(given[0]),))
    if dense:
        dequantize_(found)
    first = windows.shape[1] // 2
    with torch.inference_mode():
        each = []
        for window in windows:
            logits = found(window[None]).logits[0, first:-1].double()
            each.append(F.cross_entropy(logits, window[first + 1 :], reduction="none"))
    return torch.cat(each)


def perplexity(found: Tensor) -> float:
    """Of `losses`."""
    return exp(float(found.mean()))


def in_float32(folder: Path, place: Path) -> Path:
    """A GGUF file with the dequantized weights of a folder."""
    import transformers

    found: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    dequantize_(found)
    dense: Any = model.load()
    dense.load_state_dict(found.state_dict())
    dense.save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (place / name).write_bytes((folder / name).read_bytes())
    converted = place.with_name(f"{place.name}-gguf")
    convert_checkpoint(place, converted, "gguf")
    return converted / "model.gguf"


def theirs(program: Path, file: Path, text: Path, count: int) -> float:
    """What llama.cpp's own program says of so many windows, without flash attention and in float32 caches."""
    command = [program, "-m", file, "-f", text, "-c", evaluate.CONTEXT, "-b", evaluate.CONTEXT]
    command += ["--chunks", count, "-fa", "off", "-ctk", "f32", "-ctv", "f32", "-t", 1]
    # repacked weights go through AMX, which processors may claim to have and virtual machines refuse
    command.append("--no-repack")
    for _ in range(3):  # the program may end before its log is written
        done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
        told = done.stdout + done.stderr
        if (found := re.search(r"Final estimate: PPL = ([0-9.]+)", told)) is not None:
            return float(found[1])
    raise SystemExit(f"error: no perplexity in what {program.name} says:\n{told[-2000:]}")


def measure(
    programs: Path,
    count: int,
    few: int,
    place: Path,
    chosen: list[str],
    told: Callable[[dict[str, Any]], None],
) -> None:
    """Tell a row for each recipe: the perplexities, and the verdict of the conversion."""
    text = place / "text.txt"
    text.write_text(evaluate.text(), encoding="utf-8")
    convert_checkpoint(model.path(), place / "read", "ao")
    original = place / "float32"
    original.mkdir()
    model.load().save_pretrained(original)  # type: ignore[operator]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (original / name).write_bytes((place / "read" / name).read_bytes())
    windows = model.tokens(evaluate.text())[: count * evaluate.CONTEXT].view(count, -1)
    for number, (name, config) in enumerate((each, RECIPES[each]) for each in chosen):
        folder = place / "read" if config is None else place / f"ao-{number}"
        if config is not None:
            # the embedding, which is the head too, stays dense where GGUF has not what ao makes of it
            kept = [] if isinstance(config, GGUFWeightOnlyConfig) else ["model.embed_tokens"]
            quantize_checkpoint(original, folder, config, exclude=kept)
        converted = convert_checkpoint(folder, place / f"gguf-{number}", "gguf")
        program, file = programs / "llama-perplexity", place / f"gguf-{number}/model.gguf"
        exact = in_float32(folder, place / f"float32-{number}")
        as_theirs = losses(folder, windows, dense=True, inputs=rounded)
        torch.manual_seed(0)
        again = losses(folder, windows, dense=True, inputs=lambda x: rounded(nudged(x)))
        row: dict[str, Any] = {
            "recipe": name,
            "verdict": converted.verdict,
            "types": sorted({verdict.target for verdict in converted.verdicts}),
            "llama.cpp": theirs(program, file, text, len(windows)),
            "rounded": perplexity(as_theirs),
            "rounded, nudged": perplexity(again),
            # of the logarithm of the perplexity: what two runs differ by at random
            "deviation": float((again - as_theirs).std()) / len(again) ** 0.5,
            "llama.cpp, float32": theirs(program, exact, text, few),
            "kernels": perplexity(losses(folder, windows[:few])),
            "dense": perplexity(losses(folder, windows[:few], dense=True)),
        }
        told(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--programs", type=Path, required=True, help="the folder of llama-perplexity"
    )
    parser.add_argument("--windows", type=int, default=32, help="with inputs rounded to int8")
    parser.add_argument("--few", type=int, default=5, help="windows in float32")
    parser.add_argument("--only", default="", help="a regular expression for recipes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = _there(args.json, args.windows)

    def told(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        rows.append(row)
        if args.json:
            record(args.json, args.programs, args.windows, args.few, rows)

    chosen = [name for name in RECIPES if re.search(args.only, name)]
    chosen = [name for name in chosen if name not in {row["recipe"] for row in rows}]
    with tempfile.TemporaryDirectory() as place:
        measure(args.programs, args.windows, args.few, Path(place), chosen, told)


def _there(path: Path | None, windows: int) -> list[dict[str, Any]]:
    """The rows of a file that was written before, of as many tokens."""
    if path is None or not path.exists():
        return []
    data = json.loads(path.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = data["rows"]
    return found if data["about"]["tokens"] == windows * evaluate.CONTEXT else []


def record(path: Path, programs: Path, windows: int, few: int, rows: list[dict[str, Any]]) -> None:
    """Write what was found, with the machine and the versions."""
    version = (programs / "libllama.so").resolve().name.removeprefix("libllama.so.")
    about = results.environment() | {
        "llama.cpp": version,
        "model": model.path().name,
        "tokens": windows * evaluate.CONTEXT,
        "tokens in float32": few * evaluate.CONTEXT,
    }
    text = json.dumps({"about": about, "rows": rows}, indent=1) + "\n"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
