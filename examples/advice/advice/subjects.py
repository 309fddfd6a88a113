"""Five trained models, each with inputs to calibrate on, others to be judged on, and calls to be timed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_EXAMPLES = Path(__file__).resolve().parents[2]
sys.path += [str(_EXAMPLES / name) for name in ("smollm2", "minilm", "bytelm", "digits")]
sys.path.append(str(_EXAMPLES.parent / "scripts"))

Sample = Any


@dataclass(frozen=True)
class Subject:
    """A model and its inputs."""

    model: nn.Module
    #: to calibrate on, about 1,000 positions, and to be judged on; they have nothing in common
    data: list[Sample]
    held_out: list[Sample]
    #: what is lost: "kl" of the answers, or "output": their squared error over the sum of their squares
    measure: str
    #: name of a way to use it -> its input
    uses: dict[str, Sample]


def smollm2() -> Subject:
    """A language model of 135 million parameters, and sections of Python's documentation."""
    from smollm2 import evaluate, model

    made = model.off_grid(model.load())
    windows = evaluate.spread(model.tokens(evaluate.text()), 6)
    texts = [{"input_ids": window[None]} for window in windows]
    tokens = windows[1]
    return Subject(
        made,
        texts[1::3],
        [texts[i] for i in (0, 2, 3, 5)],
        "kl",
        {
            "decode": {"input_ids": tokens[None, 8:9]},
            "batch 8": {"input_ids": tokens[:8, None]},
            "prefill": {"input_ids": tokens[None, :256]},
        },
    )


def minilm() -> Subject:
    """An encoder of sentences, and docstrings of the standard library, all cut to 48 tokens."""
    from minilm_demo import corpus
    from minilm_demo import minilm as encoder

    length = 48
    pairs = corpus.docstring_pairs(600)
    batches = encoder.tokenize([pair.document for pair in pairs], length)
    whole = [batch for batch in batches if batch.ids.shape[1] == length]
    rows = torch.cat([batch.ids[batch.mask.bool().all(1)] for batch in whole])

    def sample(ids: Tensor) -> Sample:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    texts = [sample(part) for part in rows.split(8)]
    return Subject(
        encoder.load(),
        texts[:3],
        texts[3:11],
        "output",
        {
            "decode": sample(rows[:1, :8]),
            "batch 8": sample(rows[:8, :8]),
            "prefill": sample(rows[:8]),
        },
    )


def whisper() -> Subject:
    """A model of speech: sounds, and sections of Python's documentation as what was said."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer
    from transformers import WhisperFeatureExtractor

    import whisper_ct2

    tokenizer = Tokenizer.from_file(str(whisper_ct2.folder() / "tokenizer.json"))
    text = tokenizer.encode(topics["comparisons"], add_special_tokens=False).ids
    time = torch.arange(4 * 16000) / 16000
    extract = WhisperFeatureExtractor()

    def sample(number: int, tokens: int = 200) -> Sample:
        hertz, generator = 220 * 1.3**number, torch.Generator().manual_seed(number)
        sound = torch.sin(2 * math.pi * hertz * time) * ((3 + number) * time).sin().abs()
        sound = sound + 0.05 * torch.randn(len(time), generator=generator)
        made = extract([sound.numpy()], sampling_rate=16000, return_tensors="pt")
        words = text[number * tokens : (number + 1) * tokens]
        return {
            "input_features": made.input_features,
            "decoder_input_ids": torch.tensor([[50257, 50362, *words]]),
        }

    samples = [sample(number) for number in range(9)]
    few = [{**s, "decoder_input_ids": s["decoder_input_ids"][:, :8]} for s in samples]
    batch = {name: torch.cat([s[name] for s in few[:8]]) for name in few[0]}
    return Subject(
        whisper_ct2.load().requires_grad_(False),
        samples[:5],
        samples[5:],
        "kl",
        {
            "decode": {**few[0], "decoder_input_ids": few[0]["decoder_input_ids"][:, :1]},
            "batch 8": batch,
            "prefill": samples[0],
        },
    )


def bytelm() -> Subject:
    """A language model of bytes with 3 million parameters, and files of the standard library."""
    from bytelm import data, model

    windows = data.spread(data.read_corpus().held_out, 512, 10)
    parts = [window[None] for window in windows]
    return Subject(
        model.load(),
        parts[:2],
        parts[2:],
        "kl",
        {
            "decode": windows[:1, :1],
            "batch 8": windows[:8, :1],
            "prefill": windows[:1],
        },
    )


def digits() -> Subject:
    """A vision transformer of 0.5 million parameters, and images of digits."""
    from digits import train

    learn, held_out = train.load()
    pixels = learn.pixels[:1024].split(256)
    return Subject(
        train.train(learn, 0),
        list(pixels),
        list(held_out.pixels.split(250)),
        "kl",
        {
            "decode": held_out.pixels[:1],
            "batch 8": held_out.pixels[:8],
            "prefill": held_out.pixels[:64],
        },
    )


#: what tables call it -> makes it
SUBJECTS: Mapping[str, Callable[[], Subject]] = {
    "SmolLM2": smollm2,
    "MiniLM": minilm,
    "Whisper tiny.en": whisper,
    "byte model": bytelm,
    "digits": digits,
}
