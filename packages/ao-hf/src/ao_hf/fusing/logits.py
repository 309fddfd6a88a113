"""One token of each text to its logits in one op: all blocks, the last norm, and the head."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ao_core import QTensor
from ao_core.ext.kernels import OutputHead, Projection
from ao_hf.cache.caches import AoCache
from ao_hf.fusing.block import _Forward
from ao_hf.fusing.decoder import FusedDecoder
from ao_hf.fusing.observe import Observed, Seen
from ao_hf.fusing.runs import Run
from ao_hf.fusing.structure import NotFused, norm_before, plain

__all__ = ["FusedModel", "model_parts"]


class FusedModel(_Forward):
    """The forward of the module that calls the decoder, and the head on what it returns.

    Args:
        module: the model.
        decoder: the fused forward of the module that calls the blocks.
        run: of all these blocks.
        head: makes logits of what the decoder returns.
        result: the class of the model's outputs.
    """

    ops = ("all blocks + norm + head, for one token, over an AoCache",)

    def __init__(
        self, module: Any, decoder: FusedDecoder, run: Run, head: nn.Linear, result: type
    ) -> None:
        super().__init__(module, [decoder.norm, head], [head])
        self._decoder, self._run, self._result = decoder, run, result
        inner = decoder.module
        self.hooks += (inner._forward_hooks, inner._forward_pre_hooks)
        self._places += [
            (parent._modules, name, child)
            for parent in module.modules()
            for name, child in parent._modules.items()
            if child is inner
        ]
        self._places += [(vars(inner), "forward", decoder)]
        # generation asks which arguments a model takes
        self.__signature__ = inspect.signature(type(module).forward.__get__(module))

    def run(
        self,
        *args: Any,
        past_key_values: Any = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """The same in one op; NotImplemented where it cannot be."""
        if args or type(past_key_values) is not AoCache or return_dict is False:
            return NotImplemented
        if not isinstance(logits_to_keep, int) or not self._decoder.applies():
            return NotImplemented
        begun = self._decoder.begin(past_key_values=past_key_values, pads=True, **kwargs)
        logits = None if begun is None else self._run.logits(*begun)
        if logits is None:
            return NotImplemented
        return self._result(logits=logits, past_key_values=past_key_values)


def model_parts(model: Any, run: Run, observed: Observed) -> FusedModel:
    """A model that makes logits by a linear layer of what its decoder returns.

    Raises:
        NotFused: it is made in another way, or the head is not quantized.
    """
    decoder = next(
        (d for m in model.modules() if isinstance(d := vars(m).get("forward"), FusedDecoder)), None
    )
    if decoder is None or decoder.module is model:
        raise NotFused("no module around the decoder makes logits")
    plain(model)
    if [block.module for block in run.blocks] != list(decoder.blocks):
        raise NotFused("its blocks are no single run")
    head, calls = _head_of(model, observed)
    for own, after, made in zip(
        observed.calls[model], calls, observed.calls[decoder.module], strict=True
    ):
        _check(own, after, made)
    found = FusedModel(model, decoder, run, head, type(observed.calls[model][0].output))
    run.head = OutputHead(norm_before(decoder.norm), Projection(head.weight, head.bias))  # type: ignore[arg-type]
    return found


def _head_of(model: Any, observed: Observed) -> tuple[nn.Linear, list[Seen]]:
    """The linear layer whose results are the logits."""
    logits = [getattr(seen.output, "logits", None) for seen in observed.calls[model]]
    for child in model.children():
        calls = observed.calls.get(child, [])
        if len(calls) != len(logits) or any(
            a.output is not b for a, b in zip(calls, logits, strict=True)
        ):
            continue
        if type(child) is not nn.Linear:
            raise NotFused(f"the head is a {type(child).__name__}, no plain nn.Linear")
        plain(child, "the head")
        if type(child.weight) is not QTensor:
            raise NotFused("the weight of the head is not quantized")
        if hasattr(child, "_hf_tp_plan"):
            raise NotFused("the head is sharded over devices")
        return child, calls
    raise NotFused("its logits are not what a linear layer returns")


def _check(own: Seen, head: Seen, decoder: Seen) -> None:
    """Raise `NotFused` unless the head reads what the decoder returns, and the model returns its logits."""
    hidden = getattr(decoder.output, "last_hidden_state", None)
    if hidden is None or not torch.equal(head.x, hidden):
        raise NotFused("the head does not read what the decoder returns")
    filled = {name for name, value in own.output.items() if value is not None}
    if filled != {"logits", "past_key_values"}:
        raise NotFused("the model returns more than logits and a cache")
