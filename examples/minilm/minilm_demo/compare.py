"""The comparison itself: make every variant, measure its size and quality, then all latencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rich.progress import Progress, TaskID
from torch import Tensor, nn

from ao_core import Config
from minilm_demo import latency, minilm, variants
from minilm_demo.corpus import Pair
from minilm_demo.metrics import quality
from minilm_demo.minilm import Batch
from minilm_demo.results import Result, layers_of
from minilm_demo.variants import BF16, FP32, Variant

#: workload -> how many documents are embedded at once
WORKLOADS = {"1 text": 1, "4 texts": 4}


@dataclass(frozen=True)
class Comparison:
    """What came out."""

    results: list[Result]
    #: recipe -> why there is no result for it
    left_out: dict[str, str]
    #: the models by the names of the results
    models: dict[str, nn.Module]


def compare(
    pairs: Sequence[Pair],
    tokens: tuple[int, int],
    configs: dict[str, tuple[Config, str]],
    seconds: float,
    progress: Progress,
) -> Comparison:
    """Compare the variants that configurations make of the model.

    Args:
        pairs: the texts.
        tokens: where queries and documents are cut.
        configs: name -> configuration and summary.
        seconds: for the latency of each workload, about.
        progress: where bars are shown.
    """
    bar = progress.add_task("loading the model", total=len(configs) + 2)
    show = partial(progress.update, bar)
    model = minilm.load()
    texts = (
        minilm.tokenize([pair.query for pair in pairs], tokens[0]),
        minilm.tokenize([pair.document for pair in pairs], tokens[1]),
    )
    baselines = variants.baselines(model)
    show(description=f"{FP32}: embedding {2 * len(pairs)} texts")
    original = [minilm.encode(model, batches) for batches in texts]

    def measured(variant: Variant, vectors: list[Tensor] | None = None) -> Result:
        show(description=f"{variant.name}: embedding {2 * len(pairs)} texts")
        vectors = vectors or [minilm.encode(variant.model, batches) for batches in texts]
        show(description=f"{variant.name}: saving")
        found = Result(
            variant.name,
            variant.summary,
            variants.memory_bytes(variant.model),
            variants.disk_bytes(variant.model),
            quality(vectors[0], vectors[1], original[0], original[1]),
            layers_of(variant.report) if variant.report else [],
            variant.seconds,
        )
        show(advance=1)
        return found

    def made(name: str) -> tuple[Result, nn.Module] | str:
        def on_parameter(done: int, total: int, fqn: str) -> None:
            show(description=f"{name}: quantizing {done}/{total}")

        variant = variants.quantized(model, name, *configs[name], on_parameter)
        if isinstance(variant, Variant):
            return measured(variant), variant.model
        show(advance=1)
        return variant

    # each thread takes a recipe of its own: much of quantizing and saving has work for one core only
    with minilm.threads() as pool:
        found = dict(zip(configs, pool.map(made, configs), strict=True))
    results = [measured(baselines[0], original), *map(measured, baselines[1:])]
    models = {variant.name: variant.model for variant in baselines}
    for name, each in found.items():
        if not isinstance(each, str):
            results.append(each[0])
            models[name] = each[1]
    left_out = {name: each for name, each in found.items() if isinstance(each, str)}
    show(description="size and quality")
    return Comparison(_timed(results, models, texts[1], seconds, progress), left_out, models)


def _timed(
    results: list[Result],
    models: dict[str, nn.Module],
    documents: Sequence[Batch],
    seconds: float,
    progress: Progress,
) -> list[Result]:
    """The results with latencies: each variant as it is and in bfloat16, all interleaved."""
    contenders = {(name, FP32): model for name, model in models.items() if name != BF16}
    others = {name: model for name, model in models.items() if name != FP32}
    with minilm.threads() as pool:
        narrow = pool.map(variants.in_bfloat16, others.values())
        contenders |= {(name, BF16): each for name, each in zip(others, narrow, strict=True)}
    timed = results
    for workload, count in WORKLOADS.items():
        bar = progress.add_task(f"latency of {workload}, interleaved", total=1.0)
        batch = minilm.longest(documents, count)
        calls = {f"{n}|{dtype}": _call(model, batch) for (n, dtype), model in contenders.items()}
        samples = latency.interleaved(
            calls, seconds=seconds, on_round=partial(_show_share, progress, bar)
        )
        progress.update(bar, completed=1.0)
        found = latency.summarize(samples, {FP32: f"{FP32}|{FP32}", BF16: f"{BF16}|{BF16}"})
        timed = [
            replace(
                result,
                latency={
                    **result.latency,
                    workload: {
                        dtype: found[key]
                        for dtype in (FP32, BF16)
                        if (key := f"{result.name}|{dtype}") in found
                    },
                },
            )
            for result in timed
        ]
    return timed


def _show_share(progress: Progress, bar: TaskID, share: float) -> None:
    progress.update(bar, completed=share)


def _call(model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
    return partial(minilm.embed, model, batch)
