"""Measure plans of the cache of SmolLM2-135M, and one recipe for all layers, on text that no plan has seen.

Every token is read from its codes, in the making of plans and in the measuring.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from smollm2 import evaluate, model
from torch import Tensor

from ao_hf import AoCache, CachePlan, plan_cache
from ao_quant.kv_cache import KV_RECIPES

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from benchmarking import environment

#: mean bits per element of keys and values
BITS = (4.5, 5.0, 5.5, 6.0, 7.0)
#: tokens of a window of the data of a plan, and how many windows there are
DATA = (256, 4)
#: tokens of a window that plans are measured on
CONTEXT = 1024

Row = dict[str, Any]


def split(tokens: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Windows for plans, and so many to measure on: the second halves of parts that begin with the first."""
    parts = tokens.split(len(tokens) // max(count, DATA[1]))[: max(count, DATA[1])]
    data = [part[: DATA[0]][None] for part in parts[: DATA[1]]]
    return data, [part[len(part) // 2 :][:CONTEXT][None] for part in parts[:count]]


@torch.inference_mode()
def predict(network: Any, window: Tensor, layers: Any) -> Tensor:
    """The logarithms of the probabilities of the next token, with a recipe for each layer."""
    cache = AoCache(network.config, layers)
    return F.log_softmax(network(window, past_key_values=cache).logits[0, :-1].float(), dim=-1)


def loss(network: Any, held_out: list[Tensor], exact: list[Tensor], layers: Any) -> Row:
    """What is lost with a recipe for each layer: KL in nats, its standard error by windows, agreement."""
    found = [None if name is None else replace(KV_RECIPES[name], window=0) for name in layers]
    kls, same = [], []
    for window, right in zip(held_out, exact, strict=True):
        logs = predict(network, window, found)
        kls.append(F.kl_div(logs, right, log_target=True, reduction="sum") / len(right))
        same.append((logs.argmax(-1) == right.argmax(-1)).double().mean())
    kl = torch.stack(kls).double()
    return {
        "kl_nats": float(kl.mean()),
        "kl_error": float(kl.std() / len(kls) ** 0.5),
        "agreement": float(torch.stack(same).mean()),
    }


def main() -> None:
    """Measure, and write all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where the figures are written")
    parser.add_argument("--windows", type=int, default=6, help=f"of {CONTEXT} tokens of text")
    args = parser.parse_args()
    network: Any = model.load()
    tokens = model.tokens(evaluate.text())
    data, held_out = split(tokens, args.windows)
    network.set_attn_implementation("ao_kv")
    count = network.config.num_hidden_layers
    exact = [predict(network, window, [None] * count) for window in held_out]
    found: Row = {
        "about": environment() | {"threads": torch.get_num_threads()},
        "data": {"windows": DATA[1], "tokens": DATA[0]},
        "held_out": {"windows": args.windows, "tokens": CONTEXT},
        "uniform": [],
        "plans": [],
    }
    plan = None
    for bits in BITS:
        start = time.process_time()
        plan = plan_cache(network, data, bits=bits, known=plan)
        seconds = round(time.process_time() - start, 1)
        if not found["uniform"]:
            found["uniform"] = uniform(network, held_out, exact, plan)
        row: Row = {"budget": bits, "bits": plan.bits, "bytes_per_token": plan.bytes_per_token}
        row |= {"layers": list(plan.layers), "added": plan.loss, "measured": plan.measured}
        row |= {"rank_correlation": plan.rank_correlation, "processor_seconds": seconds}
        found["plans"].append(row | loss(network, held_out, exact, plan.layers))
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(plan, flush=True)


def uniform(
    network: Any, held_out: list[Tensor], exact: list[Tensor], plan: CachePlan
) -> list[Row]:
    """Each candidate for all layers."""
    elements = sum(choice.elements for choice in plan.choices)
    return [
        {
            "recipe": each.recipe,
            "bits": 8 * each.bytes_per_token / elements,
            "bytes_per_token": each.bytes_per_token,
            "measured": each.measured,
            **loss(network, held_out, exact, [each.recipe] * plan.count),
        }
        for each in plan.uniform
    ]


if __name__ == "__main__":
    main()
