"""Hostile files that are no checkpoints of models: configurations, plans, reports, states of optimizers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from changes import VALUES, json_change, noise, places, special
from torch import Tensor, nn

from ao_core import FqnToConfig, Report, config_to_json, quantize_checkpoint, resolve_config
from ao_core.ext import AoError, ConfigError
from ao_core.ext.cli import load_config
from ao_optim import AdamW4bit, AdamW8bit, SGD8bit
from ao_quant import Int4WeightOnlyConfig, QuantizationPlan, plan

__all__ = ["change_optimizer", "change_text", "make_others", "optimizers", "texts"]

#: formats of state: tables, two scales a moment, one moment
OPTIMIZERS = (AdamW8bit, AdamW4bit, SGD8bit)


def make_others(root: Path) -> None:
    """The folders that cases begin with."""
    (folder := root / "texts").mkdir()
    mse = Int4WeightOnlyConfig(32, scale_method="mse")
    rules = {"0.weight": mse, r"re:.*\.bias": None, "*": "int8_weight_only"}
    (folder / "config.json").write_text(config_to_json(FqnToConfig(rules)))
    act = resolve_config("int8_dynamic_activation_int8_weight")
    (folder / "flat.json").write_text(config_to_json(act))
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    candidates = ["int8_weight_only", "int4_weight_only"]
    plan(layers, bits=7.0, candidates=candidates, measure="weight").save(folder / "plan.json")
    report = quantize_checkpoint(root / "dense", root / "reported", "int8_weight_only")
    (folder / "report.json").write_text(report.to_json())
    (folder := root / "optimizers").mkdir()
    for cls in OPTIMIZERS:
        torch.save(stepped(cls)[1].state_dict(), folder / f"{cls.__name__}.pt")


def stepped(cls: type[Any]) -> tuple[nn.Parameter, Any]:
    """A parameter, and an optimizer that has a state of it."""
    param = nn.Parameter(torch.ones(64, 80))
    optimizer = cls([param])
    param.grad = torch.linspace(-1, 1, param.numel()).view_as(param)
    optimizer.step()
    return param, optimizer


def change_text(folder: Path, rng: random.Random) -> str | None:
    """Change one of the texts."""
    name = rng.choice(("config.json", "flat.json", "plan.json", "plan.json", "report.json"))
    if rng.random() < 0.1:
        return special(folder, rng)
    return noise(folder, rng) if rng.random() < 0.2 else json_change(name)(folder, rng)


def texts(folder: Path) -> list[tuple[str, Any]]:
    """What reads texts."""
    return [
        ("config", lambda: load_config(str(folder / "config.json"), []).check()),
        ("settings", lambda: load_config(str(folder / "flat.json"), ["symmetric_activations=no"])),
        ("plan", lambda: QuantizationPlan.load(folder / "plan.json").check()),
        ("command", lambda: load_config(str(folder / "plan.json"), []).check()),
        ("report", lambda: _report(folder / "report.json")),
    ]


def _report(path: Path) -> None:
    if path.is_file():
        text = path.read_text("utf-8", errors="replace")
        report = Report.from_json(text)
        str(report), report.to_json(), report.to_html()


def change_optimizer(folder: Path, rng: random.Random) -> str:
    """Change places of a state dict, tensors among them, or parts of a quantized moment."""
    path = rng.choice(sorted(folder.iterdir()))
    state = torch.load(path, weights_only=True)
    what = []
    for _ in range(rng.choice((1, 1, 2))):
        place = rng.choice(list(places(state)))
        at = state
        for key in place[:-1]:
            at = at[key]
        at[place[-1]] = _other(at[place[-1]], rng)
        what.append(f"{place} = {at[place[-1]]!r:.60}")
    torch.save(state, path)
    return f"{path.name}: {'; '.join(what)}"


def _other(old: Any, rng: random.Random) -> Any:
    if not isinstance(old, Tensor) or rng.random() < 0.4:
        values = [
            *VALUES,
            torch.tensor(-1.0),
            torch.ones(2, 3),
            torch.ones(64, 80, dtype=torch.int64),
        ]
        return rng.choice(values)
    dense = old.dequantize() if hasattr(old, "spec") else old
    others = (dense.double(), dense[None], dense.flatten(), dense * torch.nan, dense.to_sparse())
    return rng.choice((*others, None))


def optimizers(folder: Path) -> None:
    """Load each; after an error, state and groups are what they were, and without one a step is possible."""
    for cls in OPTIMIZERS:
        param, optimizer = stepped(cls)
        state = torch.load(folder / f"{cls.__name__}.pt", weights_only=True)
        before, groups = (
            optimizer.to_full_state()["state"],
            json.dumps(optimizer.param_groups, default=repr),
        )
        try:
            optimizer.load_state_dict(state)
        except AoError:
            raise
        except (ValueError, TypeError) as error:  # as the optimizers of torch
            after = optimizer.to_full_state()["state"]
            same = all(torch.equal(after[0][name], before[0][name]) for name in before[0])
            named = any(word in str(error) for word in ("param_groups", "state", "of parameter 0"))
            if not (same and named and json.dumps(optimizer.param_groups, default=repr) == groups):
                raise
            raise ConfigError(str(error)) from error
        optimizer.step()
        assert param.shape == (64, 80)
