"""Errors of a layer's outputs after GPTQ beside those of other packages: same weight, data and format.

`python compare_algorithms.py --json FILE`, with `gptqmodel` and `brevitas` installed (`nox -s algorithms`).
Fails where GPTQ has more than 1.00 times the error of another package's.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ao_core import quantize_
from ao_quant import GPTQConfig, Int4WeightOnlyConfig, IntxWeightOnlyConfig

#: rows, columns, rows of data of a layer
SIZES = ((256, 512, 2048), (192, 1024, 2048))
#: the most that an error may be of that of another package
MOST = 1.0


def layer_and_data(
    rows: int, columns: int, count: int, seed: int
) -> tuple[nn.Linear, list[Tensor]]:
    """A linear layer, and correlated inputs with some large channels, as language models have."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(columns, rows, bias=False)
    layer.weight.data = torch.randn(rows, columns, generator=generator) / columns**0.5
    mix = torch.eye(columns) + torch.randn(columns, columns, generator=generator) / columns**0.5
    mix[:, :: columns // 8] *= 8
    x = torch.randn(count, columns, generator=generator) @ mix
    return layer.eval().requires_grad_(False), list(x.split(256))


def ours(layer: nn.Linear, data: list[Tensor], bits: int, group: int) -> Tensor:
    """The weight by GPTQ of this package."""
    model = nn.Sequential(copy.deepcopy(layer))
    base = Int4WeightOnlyConfig(group) if bits == 4 else IntxWeightOnlyConfig(bits, group)
    quantize_(model, GPTQConfig(base), data=data)
    return model[0].weight.dequantize()  # type: ignore[operator,no-any-return]


def gptqmodel(layer: nn.Linear, data: list[Tensor], bits: int, group: int) -> Tensor:
    """The same by the class that does the work in GPT-QModel."""
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ

    solver = GPTQ(copy.deepcopy(layer), QuantizeConfig(bits=bits, group_size=group, sym=False))
    solver.quantizer.configure(perchannel=True)
    for batch in data:
        solver.add_batch(batch[None], layer(batch)[None])
    values: Tensor = solver.quantize()[0]
    return values.float()


def brevitas(layer: nn.Linear, data: list[Tensor], bits: int, group: int) -> Tensor:
    """The same by Brevitas, with act-order."""
    from brevitas.graph.gptq import gptq_mode
    from brevitas.nn import QuantLinear
    from brevitas.quant.shifted_scaled_int import ShiftedUint8WeightGroupQuantFloat

    rows, columns = layer.weight.shape
    model = nn.Sequential(
        QuantLinear(
            columns,
            rows,
            bias=False,
            weight_quant=ShiftedUint8WeightGroupQuantFloat,
            weight_bit_width=bits,
            weight_group_size=group,
        )
    ).eval()
    model[0].weight.data.copy_(layer.weight)
    with torch.no_grad(), gptq_mode(model, act_order=True, use_quant_activations=False) as mode:
        for _ in range(mode.num_layers):
            for batch in data:
                mode.model(batch)
            mode.update()
    value: Tensor = model[0].quant_weight().value
    return value.detach()


PEERS: dict[str, Callable[[nn.Linear, list[Tensor], int, int], Tensor]] = {
    "gptqmodel": gptqmodel,
    "brevitas": brevitas,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for bits, group in ((4, 128), (3, 64)):
        for seed, (n, k, count) in enumerate(SIZES):
            layer, data = layer_and_data(n, k, count, seed)
            x = torch.cat(data).double()

            def error(new: Tensor, layer: nn.Linear = layer, x: Tensor = x) -> float:
                return float((x @ (new.double() - layer.weight.double()).t()).square().sum())

            own = error(ours(layer, data, bits, group))
            for name in args.peers:
                its = error(PEERS[name](layer, data, bits, group))
                row = {"format": f"int{bits} g{group}", "shape": [n, k], "peer": name}
                rows.append(row | {"error": own, "its": its, "ratio": round(own / its, 4)})
    args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if worse := [row for row in rows if row["ratio"] > MOST]:
        raise SystemExit(f"larger errors than those of another package: {worse}")


if __name__ == "__main__":
    main()
