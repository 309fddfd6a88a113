"""The training loop: Muon and AdamW or others, one process or several that average their gradients."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from tqdm import tqdm

from bytelm import data
from bytelm.data import Corpus
from bytelm.evaluate import bits_per_byte
from bytelm.model import ByteLM
from bytelm.precision import optimizer_class

#: file names in the folder of a run: what resuming needs, and the curve
STATE, CURVE = "state.pt", "curve.json"


@dataclass(frozen=True)
class TrainConfig:
    """What a run is. All but `steps` counts hold for the sum over the processes."""

    steps: int = 3000
    #: windows in a step, and the bytes that each predicts
    batch: int = 32
    context: int = 256
    #: how the matmuls of the linear layers are computed; see `bytelm.precision.convert`
    recipe: str = "bf16"
    #: of the matrices inside the layers: Muon (Jordan et al. 2024) or another of torch or ao
    optimizer: str = "Muon"
    matrix_lr: float = 0.01
    matrix_decay: float = 0.1
    #: of embedding, head and norms, by AdamW
    other_lr: float = 3e-3
    warmup: int = 50
    #: the learning rates fall linearly to zero over so many steps at the end
    cooldown: int = 1200
    #: steps between measurements, and windows measured
    measure_every: int = 100
    measure_windows: int = 128
    seed: int = 0


def schedule(step: int, config: TrainConfig) -> float:
    """Share of the learning rates: rises over `warmup`, falls to zero over `cooldown`."""
    rising = (step + 1) / max(1, config.warmup)
    falling = (config.steps - step) / max(1, config.cooldown)
    return max(0.0, min(1.0, rising, falling))


def optimizers(model: ByteLM, config: TrainConfig) -> list[Optimizer]:
    """The one that is configured for the matrices inside the layers, AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if ".layers." in name and p.ndim == 2]
    others = [p for name, p in named if not (".layers." in name and p.ndim == 2)]
    return [
        optimizer_class(config.optimizer)(
            matrices,
            lr=config.matrix_lr,  # type: ignore[call-arg]
            weight_decay=config.matrix_decay,
        ),
        AdamW(others, lr=config.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy in nats over windows (B, T + 1), computed in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def train(
    model: ByteLM,
    corpus: Corpus,
    config: TrainConfig,
    folder: Path,
    loss_fn: Callable[[nn.Module, Tensor], Tensor] = loss_of,
) -> list[dict[str, Any]]:
    """Train, measure and save as it goes, and resume where the folder has a state.

    The windows of a step depend on the seed, the step and the process alone, so that a run which was
    stopped goes on as if it had not been. Under torchrun each process takes its share of the batch.

    Args:
        model: with its first weights; changed in place.
        corpus: the text.
        config: when resuming, other values hold from there on.
        folder: where `STATE` and `CURVE` are kept.
        loss_fn: model and windows -> loss, maybe compiled.

    Returns:
        The curve: one record for each measurement.
    """
    rank, world = _process()
    found = optimizers(model, config)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in found]
    first, curve = _resume(model, found, folder)
    parameters = [p for p in model.parameters() if p.requires_grad]
    losses: list[float] = []
    seconds = curve[-1]["seconds"] if curve else 0.0
    seen = curve[-1]["bytes"] if curve else 0
    clock = time.monotonic()
    for step in tqdm(
        range(first, config.steps), initial=first, total=config.steps, disable=rank > 0
    ):
        share = schedule(step, config)
        for optimizer, lrs in zip(found, rates, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * share
        windows = _windows(corpus, config, step)
        loss = loss_fn(model, windows)
        loss.backward()
        _average([p.grad for p in parameters if p.grad is not None], world)
        for optimizer in found:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        seen += config.batch * config.context
        if (step + 1) % config.measure_every and step + 1 < config.steps:
            continue
        seconds += time.monotonic() - clock
        curve.append(
            {
                "step": step + 1,
                "bytes": seen,
                "seconds": round(seconds, 1),
                "context": config.context,
                "lr_share": round(share, 4),
                "train_bits_per_byte": round(sum(losses) / len(losses) / math.log(2), 4),
                "bits_per_byte": round(measure(model, corpus, config), 4),
            }
        )
        losses = []
        if rank == 0:
            _save(model, found, step + 1, curve, config, folder)
            tqdm.write(json.dumps(curve[-1]))
        clock = time.monotonic()
    return curve


def measure(model: nn.Module, corpus: Corpus, config: TrainConfig) -> float:
    """Bits per byte of the held-out text, a part of the windows in each process."""
    rank, world = _process()
    windows = data.spread(corpus.held_out, config.context, config.measure_windows)
    with torch.autocast("cpu", torch.bfloat16):
        total = torch.tensor(bits_per_byte(model, windows[rank::world]) * len(windows[rank::world]))
    if world > 1:
        dist.all_reduce(total)
    return float(total) / len(windows)


def _windows(corpus: Corpus, config: TrainConfig, step: int) -> Tensor:
    """This process' share of the windows of a step, (batch / processes, context + 1)."""
    rank, world = _process()
    if config.batch % world:
        raise ValueError(f"batch={config.batch} cannot be shared by {world} processes")
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + (step << 10) + rank)
    return data.sample(corpus.train, config.batch // world, config.context + 1, generator)


def _process() -> tuple[int, int]:
    """Number of this process, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _average(gradients: list[Tensor], world: int) -> None:
    """Make gradients the mean over the processes."""
    if world == 1:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, (flat / world).split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


def _resume(
    model: nn.Module, found: list[Optimizer], folder: Path
) -> tuple[int, list[dict[str, Any]]]:
    """Step to begin with and the curve so far; weights and optimizers are filled in."""
    if not (folder / STATE).exists():
        return 0, []
    state = torch.load(folder / STATE, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(found, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"], state["curve"]


def _save(
    model: nn.Module,
    found: list[Optimizer],
    step: int,
    curve: list[dict[str, Any]],
    config: TrainConfig,
    folder: Path,
) -> None:
    """Write the state under another name and rename it, so that there is always a whole one."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in found],
        "step": step,
        "curve": curve,
    }
    torch.save(state, folder / f"{STATE}.new")
    os.replace(folder / f"{STATE}.new", folder / STATE)
    text = json.dumps({"config": asdict(config), "curve": curve}, indent=1)
    (folder / CURVE).write_text(text + "\n", encoding="utf-8")
