"""Layers that are rewritten are not computed again and again."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from visited_models import Model, batches, equal, visited


class Counting(TorchFunctionMode):
    """Counts the matmuls of each linear layer that are computed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.found = model, Counter[str]()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            self.found.update(n for n, p in self.model.named_parameters() if p is args[1])
        return func(*args, **(kwargs or {}))


def test_layers_that_are_rewritten_are_computed_once_more() -> None:
    model, data = Model(), [torch.randn(2, 7, 5) for _ in range(4)]
    with Counting(model) as counting:
        kept = visited(model, data)
    with Counting(model) as without:
        # there is no memory to keep what they return
        again = visited(model, data, activation_bytes=0)
    names = [f"layers.1.{name}.weight" for name in ("q", "o", "mlp.0", "mlp.2")]
    # the trace of one batch, and for each batch one run, or one for each group that follows and the outputs;
    # in the three that were not traced it is seen before that k and v have the inputs of q
    assert [counting.found[name] for name in names] == [1 + 4 + 3, 5, 5, 5]
    assert [without.found[name] for name in names] == [1 + 4 * 4 + 3, 13, 9, 5]
    assert equal(kept, again)


class Changing(Model):
    """A block that changes what its layers return, and a weight that is multiplied with twice."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.o.register_forward_hook(lambda module, args, out: out.add_(1))
            layer.mlp[2].register_forward_hook(
                lambda module, args, out, k=layer.k: out + F.linear(out, k.weight)
            )


def test_outputs_that_are_changed_in_place_and_weights_that_are_used_twice() -> None:
    data = batches()
    torch.manual_seed(0)
    model = Changing()
    blocks, prefix = visited(model, data), visited(model, data, driver="prefix")
    assert equal(blocks, prefix)
    # a weight is rewritten when it is reached first
    assert list(blocks.values) == list(prefix.values)
    names = ("q", "v", "k", "o", "mlp.0", "mlp.2")
    assert [name for name in prefix.values if "layers" in name] == [
        f"layers.{number}.{name}.weight" for number in range(3) for name in names
    ]
