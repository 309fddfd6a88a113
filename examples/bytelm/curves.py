"""Train the byte model by several recipes and seeds, and compare how far each one gets.

Runs go on where they were stopped, and runs that the results have already are not done again:
`curves.py --recipes bf16 rowwise --seeds 0 1 2` adds what is missing. Writes the results as JSON and a
plot of the curves; scripts/generate_training_curves.py makes the table in docs/training-curves.md of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

from bytelm import data, model
from bytelm.precision import PLAIN, SPARSE, convert
from bytelm.train import TrainConfig, loss_of, train

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "minilm"))
from minilm_demo.results import environment

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("curves.json")
PICTURE = ROOT / "docs" / "assets" / "training-curves.png"
RECIPES = (PLAIN, "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
RECIPES += ("int8_mixed_precision_training", *SPARSE)
#: a model and batches of which 300 steps take a minute on one core, and runs differ by little but the recipe
SMALL = model.ModelConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2)
SHORT = TrainConfig(
    steps=300,
    batch=16,
    context=64,
    optimizer="AdamW",
    matrix_lr=1e-3,
    other_lr=1e-3,
    warmup=50,
    cooldown=150,
    measure_every=50,
)


def main() -> None:
    args = parse_args()
    settings = {field.name: getattr(args, field.name) for field in fields(TrainConfig)}
    config = TrainConfig(**settings)
    found = read(args.json, config)
    corpus = data.read_corpus()
    found["about"] = environment() | {"corpus": corpus.about}
    for seed in args.seeds:
        for recipe in args.recipes:
            if any((run["recipe"], run["seed"]) == (recipe, seed) for run in found["runs"]):
                continue
            run = train_one(replace(config, recipe=recipe, seed=seed), corpus, args.out)
            found["runs"].append(run)
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(
                f"{recipe}, seed {seed}: {run['bits_per_byte']} bits per byte held out, "
                f"{run['bytes_per_second']} tokens/s"
            )
    plot(found["runs"], args.plot)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="see bytelm/precision.py")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--json", type=Path, default=RESULTS, help="results, also those from before"
    )
    parser.add_argument("--plot", type=Path, default=PICTURE)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "curves", help="states of runs"
    )
    for field in fields(TrainConfig):
        if field.name not in ("recipe", "seed"):
            value = getattr(SHORT, field.name)
            name = f"--{field.name.replace('_', '-')}"
            parser.add_argument(name, type=type(value), default=value)
    parser.set_defaults(recipe=PLAIN, seed=0)
    return parser.parse_args()


def read(path: Path, config: TrainConfig) -> dict[str, Any]:
    """The results so far; other settings than theirs are an error."""
    settings = common(config)
    if not path.exists():
        return {"settings": settings, "runs": []}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found["settings"] != settings:
        sys.exit(
            f"{path} has runs with {found['settings']}, asked is {settings}: use another --json"
        )
    return found


def common(config: TrainConfig) -> dict[str, Any]:
    """The settings that runs must share to be compared."""
    kept = {k: v for k, v in asdict(config).items() if k not in ("recipe", "seed")}
    return kept | {"model": asdict(SMALL)}


def train_one(config: TrainConfig, corpus: data.Corpus, folder: Path) -> dict[str, Any]:
    """One run, from the first weights of its seed to its figures."""
    made = model.ByteLM(SMALL)
    model.initialize(made, config.seed)
    convert(made, config.recipe)
    place = folder / f"{config.recipe.replace('/', '-')}-{config.optimizer}-{config.seed}"
    curve = train(made, corpus, config, place, loss_of)
    return {
        "recipe": config.recipe,
        "seed": config.seed,
        "bits_per_byte": curve[-1]["bits_per_byte"],
        "bytes_per_second": round(curve[-1]["bytes"] / max(curve[-1]["seconds"], 0.1)),
        "curve": curve,
    }


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Held-out bits per byte over the steps, the mean over the seeds; below, the difference to bf16."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    means = {
        recipe: mean_curve(runs, recipe) for recipe in dict.fromkeys(r["recipe"] for r in runs)
    }
    for recipe, points in means.items():
        (line,) = upper.plot(list(points), list(points.values()), marker=".", label=recipe)
        if recipe != PLAIN and PLAIN in means:
            change = [100 * (value / means[PLAIN][step] - 1) for step, value in points.items()]
            lower.plot(list(points), change, marker=".", color=line.get_color())
    upper.set_ylabel("bits per byte, held out")
    lower.set_ylabel(f"% above {PLAIN}")
    lower.set_xlabel("steps")
    lower.axhspan(-1, 1, alpha=0.1)
    for axes in (upper, lower):
        axes.grid(visible=True, alpha=0.3)
    upper.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def mean_curve(runs: list[dict[str, Any]], recipe: str) -> dict[int, float]:
    """Step -> mean over the seeds of what was measured then."""
    curves = [run["curve"] for run in runs if run["recipe"] == recipe]
    return {
        points[0]["step"]: mean(point["bits_per_byte"] for point in points)
        for points in zip(*curves, strict=True)
    }


if __name__ == "__main__":
    main()
