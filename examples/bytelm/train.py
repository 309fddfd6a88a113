"""Train the byte-level model on the standard library; stop it at any time and start it again.

`torchrun --nproc-per-node N train.py` uses N processes of one thread each. When all steps are done,
the checkpoint, its figures and the training curve lie in the folder `checkpoint` of the run.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, fields
from pathlib import Path

import torch
import torch.distributed as dist
from bytelm import data, model
from bytelm.precision import convert
from bytelm.record import record
from bytelm.train import TrainConfig, loss_of, train

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    args = parse_args()
    config = TrainConfig(**{field.name: getattr(args, field.name) for field in fields(TrainConfig)})
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    made = model.ByteLM(model.ModelConfig())
    model.initialize(made, config.seed)
    convert(made, config.recipe)
    corpus = data.read_corpus()
    curve = train(made, corpus, config, args.out, torch.compile(loss_of))
    if dist.is_initialized():
        dist.destroy_process_group()
    if first:
        figures = record(made, corpus, curve, asdict(config), args.out / "checkpoint")
        speed = curve[-1]["bytes"] / max(curve[-1]["seconds"], 0.1)
        print(f"{speed:.0f} tokens/s in training")
        print(f"{figures['bits_per_byte']} bits per byte held out: {args.out / 'checkpoint'}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bytelm", help="folder")
    for field in fields(TrainConfig):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
