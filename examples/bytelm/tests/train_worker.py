"""One of two processes that train a model together. Arguments: its rank, and a folder with what is given."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from bytelm.model import ByteLM, initialize
from bytelm.train import train


def main(rank: int, folder: Path) -> None:
    config, corpus, settings = torch.load(folder / "given.pt", weights_only=False)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        made = ByteLM(config)
        initialize(made, seed=0)
        train(made, corpus, settings, folder / "run")
    finally:
        dist.destroy_process_group()
    torch.save(made.state_dict(), folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
