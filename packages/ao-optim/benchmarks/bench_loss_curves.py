"""Train the byte-level model of examples/bytelm with each format of state, and with several seeds.

Writes a plot beside the JSON file, `FILE.svg`, too.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "bytelm"))
sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from bytelm import data, evaluate, model

import ao_optim
from benchmarking import arguments, record

CONFIG = model.ModelConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
BASELINE = "AdamW, float32"
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    BASELINE: (torch.optim.AdamW, {}),
    "AdamW8bit": (ao_optim.AdamW8bit, {}),
    "AdamW8bit, dynamic": (ao_optim.AdamW8bit, {"state_format": "dynamic8"}),
    "AdamWFp8": (ao_optim.AdamWFp8, {}),
    "AdamW4bit": (ao_optim.AdamW4bit, {}),
}
OPTIONS = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
#: steps over which the training loss is averaged for the plot
WINDOW = 10


def train(name: str, seed: int, corpus: data.Corpus, args: Any) -> dict[str, Any]:
    """The loss of every step, and of held-out text at the end, in nats per byte."""
    made = model.ByteLM(CONFIG)
    model.initialize(made, seed)
    cls, options = OPTIMIZERS[name]
    optimizer = cls(made.parameters(), **OPTIONS, **options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, OPTIONS["lr"], total_steps=args.steps, pct_start=0.1, cycle_momentum=False
    )
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in tqdm(range(args.steps), desc=f"{name}, seed {seed}", leave=False):
        windows = data.sample(corpus.train, args.batch, args.context + 1, generator)
        loss = F.cross_entropy(made(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(round(float(loss.detach()), 4))
    held_out = data.spread(corpus.held_out, args.context, args.windows)
    nats = evaluate.bits_per_byte(made, held_out) * math.log(2)
    state = ao_optim.state_report(optimizer).total.bytes_per_element
    return {"losses": losses, "held_out": nats, "state_bytes": state}


def main() -> None:
    args = arguments(__doc__, steps=300, seeds=6, batch=8, context=64, windows=256)
    corpus = data.read_corpus()
    runs = {
        name: [train(name, seed, corpus, args) for seed in range(args.seeds)] for name in OPTIMIZERS
    }
    base = [run["held_out"] for run in runs[BASELINE]]
    rows, curves = [], []
    for name, each in runs.items():
        found = [run["held_out"] for run in each]
        beside = [100 * (a / b - 1) for a, b in zip(found, base, strict=True)]
        rows.append(
            {
                "optimizer": name,
                "bytes of state per parameter": round(each[0]["state_bytes"], 3),
                "held-out loss, nats per byte": round(mean(found), 4),
                "against float32, %": f"{mean(beside):+.2f} ± {error_of_mean(beside):.2f}",
                "of each seed, %": ", ".join(f"{value:+.2f}" for value in beside),
            }
        )
        curves.append({"optimizer": name, "losses": [run["losses"] for run in each]})
    record(
        args.json,
        "Loss under optimizers with little state",
        f"The byte-level model of `examples/bytelm` ({CONFIG.num_hidden_layers} layers of "
        f"{CONFIG.hidden_size}), {args.steps} steps of {args.batch} × {args.context} bytes with "
        f"{args.seeds} seeds, the same batches and learning rates for all: the loss over held-out text "
        "at the end, and how far it is from that with float32 state, mean and standard error over the "
        "seeds.\n\n![training loss under each](assets/optimizer-loss.svg)",
        rows,
    )
    if args.json:
        data_ = json.loads(args.json.read_text(encoding="utf-8"))
        args.json.write_text(
            json.dumps({**data_, "curves": curves}, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        plot(curves, args.json.with_suffix(".svg"))


def error_of_mean(found: list[float]) -> float:
    """The standard error of the mean; of one number there is none."""
    return stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan


def plot(curves: list[dict[str, Any]], path: Path) -> None:
    """Mean over the seeds of the training loss, smoothed, and its ratio to the baseline's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    base = None
    for curve in curves:
        smooth = torch.tensor(curve["losses"]).mean(0).unfold(0, WINDOW, 1).mean(1)
        base = smooth if base is None else base
        steps = range(WINDOW, WINDOW + len(smooth))
        above.plot(steps, smooth, label=curve["optimizer"], linewidth=1)
        below.plot(steps, 100 * (smooth / base - 1), linewidth=1)
    above.set_ylabel("loss, nats per byte")
    above.legend()
    below.set_ylabel("against float32, %")
    below.set_xlabel("step")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
