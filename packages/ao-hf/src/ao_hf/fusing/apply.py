"""`fuse` and `unfuse`: forwards are replaced on single modules, never on classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ao_core.ext import AoError, checked
from ao_hf.fusing.block import FusedBlock, FusedMlp, Head, Tail, joined
from ao_hf.fusing.decoder import FusedDecoder, decoder_parts
from ao_hf.fusing.generating import generation_cache, remove_cache
from ao_hf.fusing.logits import FusedModel, model_parts
from ao_hf.fusing.observe import AttentionSeen, Observed, Seen, evaluating, observe
from ao_hf.fusing.report import Fused, FuseReport, Kept
from ao_hf.fusing.runs import Run, install_runs
from ao_hf.fusing.structure import NotFused, attention_parts, is_own, mlp_parts, norm_before, plain

__all__ = ["fuse", "unfuse"]

_FUSED = (FusedBlock, FusedMlp, FusedDecoder, FusedModel)


@checked
def fuse(model: nn.Module) -> FuseReport:
    """Run the decoder blocks of a quantized model of transformers in fewer, larger ops, for generation.

    What comes before attention in a block becomes one op (norm, q/k/v in one matmul, rotary embedding), and
    what comes after it another (output projection, residual, norm, gate and up in one matmul, activation,
    down, residual). Of a block that is not made like this, what can be is: the MLP, with the residuals or
    alone. For one token of each text, what calls the blocks makes no mask, and takes the rotary embedding
    from a table. Which module does what is found by running the model on four tokens, and everything is tried
    against the modules themselves before it is used: what differs stays as it was, with the reason in the
    report.

    Where all blocks run as one op, `model.generate(...)` of one token at a time (greedy, sampled, beams)
    keeps keys and values in an exact `AoCache` unless it is given a cache or a `cache_implementation`, since
    that op reads ao's caches alone.

    Modules, parameters and the state dict stay the same objects and names. Weights that become one matmul
    share memory, and nothing is held twice. Whatever the fused form cannot do runs the modules' own code,
    call by call: gradients, training, autocast, compilation, hooks on inner modules, adapters, and
    attentions as outputs. A second call looks at the model afresh; call it again after `.to(...)`, or
    after weights were replaced.

    Args:
        model: a model of transformers whose linear layers are quantized; others are not fused.

    Returns:
        What was fused, and what was not and why; `.unfuse()` undoes it.
    """
    unfuse(model)
    try:
        observed = observe(model)
    except Exception as error:  # whatever a model says that does not take tokens alone
        reason = f"the model does not run on tokens alone: {type(error).__name__}: {error}"
        return FuseReport(model, (), (Kept("", reason),))
    names = {module: name for name, module in model.named_modules()}
    blocks = {names[seen.module].rpartition(".")[0]: seen for seen in reversed(observed.attention)}
    fused: list[Fused] = []
    kept: list[Kept] = []
    with evaluating(model):
        for name in reversed(blocks):
            _fuse_block(model, name, blocks[name], observed, fused, kept)
        around = _decoder(model, list(reversed(blocks)), observed) if fused else None
    whole = [vars(model.get_submodule(name)).get("forward") for name in reversed(blocks)]
    runs = install_runs([one for one in whole if isinstance(one, FusedBlock)])
    if not blocks:
        kept.append(Kept("", "no module calls an attention function of transformers"))
    logits = None
    if isinstance(around, Fused) and len(runs) == 1:
        logits = _logits(model, runs[0], observed)
    cache = _cache(model, runs, observed) if fused else None
    longest = tuple((names[run.blocks[0].module], len(run.blocks)) for run in runs)
    return FuseReport(model, tuple(fused), tuple(kept), longest, around, logits, cache)


@checked
def unfuse(model: nn.Module) -> None:
    """Take off what `fuse` put on the modules of a model."""
    remove_cache(model)
    for module in model.modules():
        fused = vars(module).get("forward")
        if isinstance(fused, _FUSED):
            fused.remove()
        elif is_own(module, "forward"):
            del module.forward


def _fuse_block(
    model: Any, name: str, seen: AttentionSeen, observed: Observed, fused: list[Fused],
    kept: list[Kept],
) -> None:  # fmt: skip
    """Install the largest form that computes what the block does."""
    block = model.get_submodule(name)
    try:
        mlp = _mlp_of(block, seen.module, observed)
        inputs = joined("gate and up", (mlp.gate, mlp.up))
    except NotFused as reason:
        kept.append(Kept(name, str(reason)))
        return
    tail = Tail(None, None, mlp, inputs)
    for form in (_whole, _after_attention):
        try:
            found = form(block, seen, observed, tail)
            _check(found, block, observed, model)
        except NotFused as reason:
            kept.append(Kept(f"{name}{_LOST[form]}", str(reason)))
            continue
        found.install()
        fused.append(Fused(name, found.ops))
        return
    alone = FusedMlp(tail)
    try:
        _check_mlp(alone, observed)
    except NotFused as reason:
        kept.append(Kept(name, str(reason)))
        return
    alone.install()
    own = next(n for n, child in block.named_modules() if child is mlp.module)
    fused.append(Fused(f"{name}.{own}", alone.ops))


def _decoder(model: Any, names: list[str], observed: Observed) -> Fused | Kept:
    """Install a forward of what calls the blocks."""
    name = names[0].rpartition(".")[0].rpartition(".")[0]
    try:
        found = decoder_parts(model, names, observed)
    except NotFused as reason:
        return Kept(name, str(reason))
    found.install()
    return Fused(name, found.ops)


def _logits(model: Any, run: Run, observed: Observed) -> Fused | Kept:
    """Install a forward of the model that makes logits in one op."""
    try:
        found = model_parts(model, run, observed)
    except NotFused as reason:
        return Kept("", f"the head: {reason}")
    found.install()
    return Fused("", found.ops)


def _cache(model: Any, runs: list[Run], observed: Observed) -> Fused | Kept:
    """Install what makes the cache of `generate`."""
    try:
        with evaluating(model):
            found = generation_cache(model, runs, observed)
    except NotFused as reason:
        return Kept("generate", str(reason))
    found.install()
    return Fused("generate", found.ops)


def _whole(block: Any, seen: AttentionSeen, observed: Observed, tail: Tail) -> FusedBlock:
    """Both halves of a block."""
    plain(block)
    attention = attention_parts(seen, observed)
    norm = _source(block, attention.inputs[0], observed)
    head = Head(norm, norm_before(norm), attention, joined("q, k and v", attention.inputs))
    return _block(block, seen, observed, tail, norm, head)


def _after_attention(block: Any, seen: AttentionSeen, observed: Observed, tail: Tail) -> FusedBlock:
    """The second half, with the module's own attention."""
    plain(block)
    return _block(block, seen, observed, tail, _source(block, seen.module, observed), None)


#: what is not fused where a form does not fit
_LOST = {_whole: ": q, k, v and rotary embedding", _after_attention: ": norms and residuals"}


def _block(
    block: Any, seen: AttentionSeen, observed: Observed, tail: Tail, before: nn.Module,
    head: Head | None,
) -> FusedBlock:  # fmt: skip
    norm = _source(block, tail.mlp.gate, observed)
    tail = Tail(norm, norm_before(norm), tail.mlp, tail.inputs)
    kwargs = observed.calls[block][0].kwargs
    return FusedBlock(block, seen.module, before, head, tail, kwargs)


def _mlp_of(block: nn.Module, attention: nn.Module, observed: Observed) -> Any:
    """The gated MLP among the children of a block.

    Raises:
        NotFused: there is none; with the reason of the child that has most parameters.
    """
    sizes = {
        child: sum(p.numel() for p in child.parameters())
        for child in block.children()
        if child is not attention
    }
    largest = max(sizes, key=lambda child: sizes[child], default=None)
    if largest is None:
        raise NotFused("it has no MLP")
    return mlp_parts(largest, observed)


def _source(block: nn.Module, reader: nn.Module, observed: Observed) -> nn.Module:
    """The child of a block that made what a module reads.

    Raises:
        NotFused: none did.
    """
    x = observed.calls[reader][0].x
    for child in block.children():
        if observed.calls[child] and observed.calls[child][0].output is x:
            return child
    raise NotFused("what a matmul reads is not the output of a norm of the block")


def _check(found: FusedBlock, block: Any, observed: Observed, model: Any) -> None:
    """Raise `NotFused` unless it computes what the block does: for a prompt, and a token with the cache."""
    inputs = [_hidden(seen) for seen in observed.calls[block]]

    def run(forward: Callable[..., Any]) -> list[Any]:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        results = []
        for seen, x in zip(observed.calls[block], inputs, strict=True):
            kwargs = {name: value for name, value in seen.kwargs.items() if value is not x}
            if kwargs.get("past_key_values") is not None:
                kwargs["past_key_values"] = cache
            results.append(forward(x, **kwargs))
        return results

    expected = run(lambda x, **kwargs: type(block).forward(block, x, **kwargs))
    for x, out, other in zip(inputs, _tried(run, found), expected, strict=True):
        if not isinstance(other, Tensor) or out is NotImplemented:
            raise NotFused("the block returns more than a tensor, or gets no rotary tables")
        if not _agrees(out, other, other.double() - x.double()):
            raise NotFused("the block is not x + attention(norm(x)), and then x + mlp(norm(x))")


def _check_mlp(found: FusedMlp, observed: Observed) -> None:
    """Raise `NotFused` unless it computes what the MLP does."""

    def run(forward: Callable[..., Any]) -> list[Any]:
        return [forward(seen.x) for seen in observed.calls[found.module]]

    outs = _tried(run, found)
    for seen, out in zip(observed.calls[found.module], outs, strict=True):
        if not _agrees(out, seen.output, seen.output.double()):
            raise NotFused("the MLP computes something else than down(f(gate(x)) * up(x))")


def _tried(run: Callable[..., list[Any]], found: FusedBlock | FusedMlp) -> list[Any]:
    try:
        return run(found.run)
    except (AoError, RuntimeError) as error:  # such as norms or tables in another dtype
        raise NotFused(f"no kernel serves it: {error}") from error


def _hidden(seen: Seen) -> Tensor:
    """The hidden states that a block was given, and nothing else by position."""
    x = seen.args[0] if seen.args else seen.kwargs.get("hidden_states")
    if not isinstance(x, Tensor) or len(seen.args) > 1:
        raise NotFused("the block takes something else than hidden states by position")
    return x


def _agrees(out: Tensor, expected: Tensor, change: Tensor) -> bool:
    """Whether a result is near enough, measured by what is added to the input, and by rounding."""
    error = (expected.double() - out.double()).norm()
    rounding = torch.finfo(expected.dtype).eps * expected.double().norm()
    return bool(error <= _TOLERANCE * change.norm() + rounding)


#: error of what a block adds to its input: activations that are quantized at run time may round differently
_TOLERANCE = 0.02
