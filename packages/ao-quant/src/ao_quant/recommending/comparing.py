"""`recommend`: a model in several recipes, one after the other next to the dense one."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn

from ao_core import Config, QTensor, quantize_, resolve_config
from ao_core.ext import ConfigError, ConfigLike, checked_but, is_converted, registry
from ao_core.ext.calibration import Data, Sample, answer, batches_of, call, evaluating, tensor_of
from ao_core.ext.numerics import error_sums
from ao_core.ext.quantizing import FilterFn, Progress, decide, watched
from ao_core.ext.reports import size_text
from ao_quant.planning.judging import MOST, measure_of
from ao_quant.planning.sizes import budget_bytes
from ao_quant.planning.text import config_text
from ao_quant.recommending.result import Compared, Recommendation, pick

__all__ = ["CANDIDATES", "recommend"]

#: recipes from 8 to 4 bits that need no data, and that the page of recipes recommends for some use
CANDIDATES = (
    "int8_weight_only",
    "int8_dynamic_activation_int8_weight/asymmetric",
    "float8_dynamic_activation_float8_weight",
    "intx_weight_only",
    "mx_weight_only/mxfp6",
    "nvfp4_weight_only",
    "int4_weight_only/g32-asymmetric",
    "int4_weight_only",
)
#: positions of answers that are compared: batches beyond that are left out
_POSITIONS = 2048
#: numbers of an answer that are widened to float64 at a time
_CHUNK = 1 << 22

#: seconds of one use of a model
Timer = Callable[[nn.Module], float]


@checked_but("data")
def recommend(
    model: nn.Module,
    data: Data,
    *,
    budget: int | str | None = None,
    max_loss: float | None = None,
    candidates: Sequence[ConfigLike] = CANDIDATES,
    filter_fn: FilterFn | None = None,
    timer: Timer | None = None,
    unit: str = "call",
    rounds: int = 5,
    progress: Progress = None,
) -> Recommendation:
    """Compare recipes for a model by size, by what its answers lose, and by time, and say which one to take.

    Each candidate is applied to a copy that shares all other parameters with the model, compared with it, and
    freed before the next one. The model is not changed.

    Args:
        model: dense.
        data: batches as for `quantize_`, which candidates that need data get too. Answers of up to 2,048
            positions are compared; those of the dense model are held.
        budget: bytes of all parameters, as a number or "1.2GB": of the candidates that fit, the one that
            loses least is recommended. Others are not measured.
        max_loss: without `budget`: the fastest candidate that loses at most this much is recommended. It is
            in nats per position where the answer has `logits`, by default 0.05; else it is the squared error
            of the answers over the sum of their squares, by default 0.01.
        candidates: configurations or names of recipes, plans included. Dense always takes part.
        filter_fn: as for `quantize_`.
        timer: takes a model and returns the seconds of one use; None: its answer to the first batch.
        unit: what that use is called in the text, such as "token".
        rounds: so many times dense and quantized model are timed in turn, after one time that does not count.
        progress: True for a bar, or a function called with (done, total, name).

    Returns:
        The table, and the recommended configuration.

    Raises:
        ConfigError: no candidate fits into the budget (says how large the smallest is), the model is
            quantized already, or an argument cannot work.
        UnknownNameError: one of the candidates is registered nowhere.
    """
    if budget is not None and max_loss is not None:
        raise ConfigError(f"budget={budget!r}, max_loss={max_loss!r}: give one of the two")
    if max_loss is not None and not max_loss >= 0:
        raise ConfigError(f"max_loss={max_loss!r}: use 0 or more")
    if rounds < 1:
        raise ConfigError(f"rounds={rounds!r}: use 1 or more")
    limit = None if budget is None else budget_bytes(budget)
    if isinstance(candidates, (str, Config)) or not candidates:
        raise ConfigError(f"candidates={candidates!r}: give a list of configurations or recipes")
    configs = list(dict.fromkeys(map(resolve_config, candidates)))
    if done := [name for name, p in model.named_parameters() if is_converted(p)]:
        raise ConfigError(
            f"model: {done[0]} and {len(done) - 1} other parameters are quantized already; give the dense "
            "model, or dequantize_ this one first"
        )
    batches = batches_of(data, "recommend")
    measure = measure_of(model, batches[0], "data")
    expected = _answers(model, batches)
    use = timer or (lambda made: _call_seconds(made, batches[0]))
    rows = [Compared(None, sum(p.nbytes for p in _parameters(model)))]
    times: list[float] = []
    for config in watched(configs, [config_text(c) for c in configs], progress, "recommend"):
        made = _quantized(model, config, batches, filter_fn)
        if isinstance(made, str):
            rows.append(Compared(config, rows[0].bytes, reason=made))
            continue
        size = sum(_stored(p) for p in _parameters(made))
        row = Compared(config, size)
        if limit is None or size <= limit:
            loss, agreement = _loss(made, batches, expected, measure)
            pairs = _pairs(model, made, use, rounds)
            times += [dense for dense, _ in pairs]
            row = replace(
                row,
                loss=loss,
                agreement=agreement,
                seconds=median(its for _, its in pairs),
                speedup=median(dense / its for dense, its in pairs),
            )
        rows.append(row)
    if limit is not None and not any(row.bytes <= limit for row in rows):
        least = min((row for row in rows if not row.reason), key=lambda row: row.bytes)
        raise ConfigError(
            f"budget={budget!r}: no candidate fits; the smallest is {least.name} with "
            f"{size_text(least.bytes)}: give at least that, or smaller candidates"
        )
    rows[0] = replace(rows[0], loss=0.0, seconds=median(times) if times else None, speedup=1.0)
    if measure == "kl":
        rows[0] = replace(rows[0], agreement=1.0)
    told, picked = pick(rows, limit, MOST[measure] if max_loss is None else max_loss, measure)
    return Recommendation(told, picked, measure, unit)


def _answers(model: nn.Module, batches: Sequence[Sample]) -> list[Tensor]:
    """Of as many batches as give enough positions; at least one."""
    found: list[Tensor] = []
    for batch in batches:
        found.append(answer(model, batch, name="data"))
        if sum(each.numel() // max(each.shape[-1], 1) for each in found) >= _POSITIONS:
            break
    return found


def _quantized(
    model: nn.Module, config: Config, batches: Sequence[Sample], filter_fn: FilterFn | None
) -> nn.Module | str:
    """A copy of the model in a recipe, which shares what stays with it; or why there is none."""
    made = copy.deepcopy(model, memo={id(p): p for p in _parameters(model)})
    needs = any(
        registry.algorithm_for(type(entry.config)) is not None
        for entry in decide(made, config, filter_fn)
        if entry.config is not None
    )
    try:
        report = quantize_(made, config, filter_fn, data=list(batches) if needs else None)
    except ConfigError as error:
        return f"not possible: {error}"
    return made if report.with_status("changed") else "changes nothing"


def _parameters(model: nn.Module) -> list[Tensor]:
    """Each once."""
    return list(model.parameters())


def _stored(parameter: Tensor) -> int:
    return parameter.stored_bytes if isinstance(parameter, QTensor) else parameter.nbytes


def _loss(
    made: nn.Module, batches: Sequence[Sample], expected: Sequence[Tensor], measure: str
) -> tuple[float, float | None]:
    """What the answers lose, and at how many of the positions they agree."""
    sums = torch.zeros(3, dtype=torch.float64)
    for batch, right in zip(batches, expected, strict=False):
        with evaluating(made):
            found = tensor_of(call(made, batch, "data")).detach()
        if measure == "kl":
            sums += _divergence(right, found)
        else:
            signal, noise = error_sums(right, found).tolist()
            sums += torch.tensor([noise, 0.0, signal], dtype=torch.float64)
    total, same, count = sums.tolist()
    loss = total / count if count else 0.0
    return loss, same / count if measure == "kl" and count else None


def _divergence(right: Tensor, found: Tensor) -> Tensor:
    """Sums over positions: KL(right ‖ found) in nats, those with the same likeliest class, their number."""
    classes = right.shape[-1]
    p, q = right.reshape(-1, classes), found.reshape(-1, classes)
    rows = max(_CHUNK // max(classes, 1), 1)
    kl, same = 0.0, 0
    for a, b in zip(p.split(rows), q.split(rows), strict=True):
        log_p, log_q = (each.double().log_softmax(-1) for each in (a, b))
        kl += float((log_p.exp() * (log_p - log_q)).sum())
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
    return torch.tensor([max(kl, 0.0), float(same), float(len(p))], dtype=torch.float64)


def _call_seconds(model: nn.Module, sample: Sample) -> float:
    """Of one answer; what a device has queued is waited for."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    with evaluating(model):
        wait()
        start = time.perf_counter()
        call(model, sample, "data")
        wait()
        return time.perf_counter() - start


def _pairs(dense: nn.Module, made: nn.Module, use: Timer, rounds: int) -> list[tuple[float, float]]:
    """Seconds of both, in turn, so that what slows the machine down for a while slows both down."""
    found = []
    for number in range(rounds + 1):
        first, second = (dense, made) if number % 2 else (made, dense)
        times = {id(each): use(each) for each in (first, second)}
        if number:  # compilers and caches need the first
            found.append((times[id(dense)], times[id(made)]))
    return found
