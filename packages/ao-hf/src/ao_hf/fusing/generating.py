"""The cache that a fused model generates with where nobody names one: exact, and read by ao's decode step."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.generation import GenerationMode

from ao_core.ext import AoError
from ao_core.ext.kernels import pinned_band
from ao_hf.cache.attention import attending
from ao_hf.cache.caches import AoCache
from ao_hf.cache.names import ATTENTION, EXACT
from ao_hf.fusing.block import _Forward
from ao_hf.fusing.observe import Observed
from ao_hf.fusing.runs import SDPA, Run
from ao_hf.fusing.structure import NotFused, is_own

__all__ = ["GenerationCache", "cache_refusal", "generation_cache", "remove_cache"]

#: the method of transformers that makes the cache of one `generate`
_METHOD = "_prepare_cache_for_generation"
#: ways of generation that do nothing with a cache but pass it to the model, and reorder its rows
_MODES = frozenset({
    GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
})  # fmt: skip


class GenerationCache:
    """Stands on one model in the place of the method that makes the cache of `generate`.

    Where the caller names a cache, or wants none, where ao's decode step does not apply, and for drafts and
    other ways of generation that do more with a cache than to fill it and to reorder its rows, that method is
    called.

    Args:
        model: of transformers.
        run: of all its blocks.
    """

    ops = ("keys and values in an exact AoCache, where no cache is asked for",)

    def __init__(self, model: Any, run: Run) -> None:
        self.model, self._run = model, run

    def install(self) -> None:
        """Stand in for the model's own method."""
        setattr(self.model, _METHOD, self)

    def __call__(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Put a cache into `model_kwargs`; arguments are those that transformers passes."""
        asked = (
            model_kwargs.get("past_key_values") is not None
            or generation_config.use_cache is False
            or generation_config.cache_implementation is not None
            # whose cache is told to remember what windows leave
            or getattr(generation_config, "is_assistant", False)
        )
        if asked or generation_mode not in _MODES or self.refuses() is not None:
            own = getattr(type(self.model), _METHOD)
            return own(
                self.model, generation_config, model_kwargs, generation_mode, *args, **kwargs
            )
        model_kwargs["past_key_values"] = AoCache(self.model.config, EXACT)
        return None

    def refuses(self) -> str | None:
        """Why ao's decode step would not serve the model as it is now; None: it would."""
        model, run = self.model, self._run
        if model.training:
            return "the model is in training mode"
        if model.device.type != "cpu":
            return f"the model is on {model.device}, where transformers compiles steps over its own cache"
        if torch.is_grad_enabled():
            return "gradients are recorded"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        if pinned_band() is not None:
            return "kernels are pinned"
        attention = model.config._attn_implementation
        if attention not in (SDPA, ATTENTION):
            return (
                f"the attention of the model is {attention!r}, neither {SDPA!r} nor {ATTENTION!r}"
            )
        if attention == SDPA and not run.is_plain:
            return f"attention has sinks, windows or a softcap, which {SDPA!r} computes otherwise"
        if any(vars(block.module).get("forward") is not block for block in run.blocks):
            return "blocks are fused no longer; call ao_hf.fuse(model) again"
        if changed := next(filter(_is_changed, model.modules()), None):
            return f"a {type(changed).__name__} is compiled, or has another forward than its own"
        return None

    def __reduce__(self) -> Any:
        # a copy is not fused: it starts with the method of its class
        return _own_method, (self.model,)


def _is_changed(module: nn.Module) -> bool:
    """Whether something else is called than the forward of the module's class, or ao's in its place."""
    forward = vars(module).get("forward")
    if module._compiled_call_impl is not None:
        return True
    return not (forward is None or isinstance(forward, _Forward) or is_own(module, "forward"))


def _own_method(model: Any) -> Any:
    return MethodType(getattr(type(model), _METHOD), model)


def cache_refusal(model: Any) -> str | None:
    """Why a model generates with transformers' cache where none is named; None: with an exact `AoCache`."""
    found = vars(model).get(_METHOD)
    if not isinstance(found, GenerationCache):
        return "ao_hf.fuse(model) has not made one run of all blocks; its report says why"
    return found.refuses()


def generation_cache(model: Any, runs: list[Run], observed: Observed) -> GenerationCache:
    """What gives a model its cache.

    Raises:
        NotFused: ao's decode step does not serve all of its layers.
    """
    if not hasattr(model, _METHOD):
        raise NotFused(f"{type(model).__name__} does not generate")
    if _METHOD in vars(model):
        raise NotFused(f"{type(model).__name__} has a {_METHOD} of its own")
    if model.config.is_encoder_decoder or not model._supports_default_dynamic_cache():
        raise NotFused("the model needs another cache than one of keys and values")
    if len(runs) != 1:
        raise NotFused(f"its blocks are {len(runs)} runs, and a step is one op where they are one")
    (run,) = runs
    x = observed.calls[run.blocks[0].module][1].x
    try:
        cache = AoCache(model.config, EXACT)
        if reason := run.refuses(cache, x):
            raise NotFused(reason)
        _check(model)
    except AoError as error:  # such as ao-quant missing, of which the cache is made
        raise NotFused(str(error)) from error
    return GenerationCache(model, run)


def _check(model: Any) -> None:
    """Raise `NotFused` unless logits over an exact `AoCache` are those over transformers' cache.

    They may differ by what rounding does, which the logits of all tokens at once show.
    """
    ids = torch.arange(1, sum(_STEPS) + 1, device=model.device)[None] % model.config.vocab_size

    def run(cache: Any, sizes: tuple[int, ...]) -> Tensor:
        steps = ids.split(sizes, 1)
        made = [model(input_ids=x, past_key_values=cache, use_cache=True).logits for x in steps]
        return torch.cat(made, 1).double()

    def own() -> DynamicCache:
        return DynamicCache(config=model.config.get_text_config(decoder=True))

    before = model.config._attn_implementation
    with attending(model, before if before in (SDPA, ATTENTION) else SDPA):
        expected, found = (run(cache, _STEPS) for cache in (own(), AoCache(model.config, EXACT)))
        rounding = (run(own(), (ids.shape[1],)) - expected).norm()
    error, bound = (found - expected).norm(), _TOLERANCE * expected.norm() + 4 * rounding
    if not error <= bound:
        raise NotFused(
            f"logits over an exact AoCache are {float(error / expected.norm()):.1%} away from those over "
            "transformers' cache"
        )


#: tokens of a prompt, of single steps, and of a turn that goes on with the cache
_STEPS = (3, 1, 1, 2, 1)
#: by which logits may differ in any case, as a share of their norm: activations that are quantized at run
#: time may round differently
_TOLERANCE = 0.02


def remove_cache(model: nn.Module) -> None:
    """Take off what `generation_cache` made."""
    if isinstance(vars(model).get(_METHOD), GenerationCache) or is_own(model, _METHOD):
        vars(model).pop(_METHOD)
