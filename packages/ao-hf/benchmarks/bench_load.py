"""Seconds to load quantized and dense folders, compared with reading their files."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn

from ao_core import load_model
from ao_hf import AoConfig
from ao_hf.accelerate import load_checkpoint_and_dispatch

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from benchmarking import Row, Samples, arguments, paired, record, rounds_of

#: models of 495 and 933 MB in bfloat16
SHAPES = {
    "28 narrow layers": {"num_hidden_layers": 28, "hidden_size": 768, "intermediate_size": 2048,
                         "num_attention_heads": 12},
    "5 wide layers": {"num_hidden_layers": 5, "hidden_size": 2048, "intermediate_size": 8192,
                      "num_attention_heads": 16},
}  # fmt: skip
#: what each loading is divided by
READ = "safetensors, each byte summed"
FOLDERS = ("int4", "bf16")

TEXT = """\
Folders of Llama models with random weights, in bfloat16 and in int4 (`int4_weight_only`; the head has 8
bits), loaded into one process with warm file caches, with {threads} thread(s) of torch. *safetensors,
mapped* is `safe_open` and `get_tensor` of all tensors, which reads no bytes; *each byte summed* adds up the
elements of every tensor, so that each page of the files is read. *× reading* divides by that, within
rounds, with its interval; *processor* is the time that the process ran, which says more on a shared
machine. `from_pretrained` of a dense folder reads no weights either: the first token does, so *and a token*
has a forward pass of one token too."""


def build(folder: Path, **sizes: int) -> None:
    """The dense folder of a model with random weights."""
    config = transformers.LlamaConfig(vocab_size=32000, tie_word_embeddings=False, **sizes)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.uniform_(-0.03, 0.03, generator=generator)
    model.save_pretrained(folder, max_shard_size="400MB")


def pretrained(folder: Path, **options: object) -> nn.Module:
    """The model, by transformers."""
    return transformers.LlamaForCausalLM.from_pretrained(folder, **options)  # type: ignore[no-any-return]


@torch.no_grad()
def first_token(folder: Path) -> Tensor:
    """Load, and compute one token."""
    return pretrained(folder)(torch.tensor([[1]])).logits  # type: ignore[no-any-return]


def mapped(folder: Path) -> list[Tensor]:
    """All tensors around mapped memory."""
    tensors = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors += [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118
    return tensors


def summed(folder: Path) -> float:
    """The sum of all bytes, taken eight at a time where a tensor begins at a multiple of eight."""
    total = 0
    for tensor in mapped(folder):
        raw = tensor.reshape(-1).view(torch.uint8)
        whole = raw.numel() // 8 * 8 if raw.data_ptr() % 8 == 0 else 0
        total += int(raw[:whole].view(torch.int64).sum()) + int(raw[whole:].sum())
    return total


def empty(folder: Path) -> nn.Module:
    """The model without values."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def contenders(folder: Path) -> dict[str, Callable[[], object]]:
    """What is timed, by folder and name."""
    found: dict[str, Callable[[], object]] = {}
    for name in FOLDERS:
        place = folder / name
        found |= {
            f"{name}: safetensors, mapped": partial(mapped, place),
            f"{name}: {READ}": partial(summed, place),
            f"{name}: from_pretrained": partial(pretrained, place),
            f"{name}: from_pretrained, and a token": partial(first_token, place),
        }
    quantized = folder / "int4"
    found["int4: load_model"] = lambda: load_model(empty(quantized), quantized, strict=False)
    found["int4: load_model, verify=False"] = lambda: load_model(
        empty(quantized), quantized, strict=False, verify=False
    )
    found["int4: load_checkpoint_and_dispatch"] = lambda: load_checkpoint_and_dispatch(
        empty(quantized), quantized
    )
    return found


def timed(calls: dict[str, Callable[[], object]], rounds: int) -> tuple[Samples, Samples]:
    """Seconds of each call, and seconds of the processor, in shuffled rounds after one to warm up."""
    busy: Samples = {name: [] for name in calls}

    def one(name: str) -> float:
        start, before = time.perf_counter(), time.process_time()
        calls[name]()
        busy[name].append(time.process_time() - before)
        return time.perf_counter() - start

    samples = rounds_of({name: partial(one, name) for name in calls}, rounds)
    return samples, {name: values[-rounds:] for name, values in busy.items()}


def measure(rounds: int) -> list[Row]:
    """One row for each contender, model by model."""
    rows = []
    for model, sizes in SHAPES.items():
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            build(folder / "bf16", **sizes)
            quantized = pretrained(
                folder / "bf16", quantization_config=AoConfig("int4_weight_only")
            )
            quantized.save_pretrained(folder / "int4", max_shard_size="400MB")  # type: ignore[operator]
            del quantized
            nbytes = {
                name: sum(f.stat().st_size for f in (folder / name).glob("*.safetensors"))
                for name in FOLDERS
            }
            samples, busy = timed(contenders(folder), rounds)
        for name in samples:
            kind, _, what = name.partition(": ")
            times = paired(samples, f"{kind}: {READ}", name)
            processor = paired(busy, f"{kind}: {READ}", name)
            rows.append(
                {
                    "model": model,
                    "folder": f"{kind}, {nbytes[kind] / 1e6:.0f} MB",
                    "what": what,
                    "seconds": median(samples[name]),
                    "× reading": times.median,
                    "95 %": times.interval(),
                    "processor s": median(busy[name]),
                    "× reading, processor": processor.median,
                    "95 %, processor": processor.interval(),
                }
            )
    return rows


if __name__ == "__main__":
    args = arguments(__doc__, rounds=11)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    text = TEXT.format(threads=torch.get_num_threads())
    record(args.json, "Loading folders of transformers", text, measure(args.rounds))
