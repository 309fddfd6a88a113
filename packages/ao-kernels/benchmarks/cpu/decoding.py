"""The decoder's contenders, and what was measured of them: seconds per token, and of a prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from decoder import Decoder, Place, Shape, after, anywhere, empty_cache, random_model, rope_table
from llama import KINDS, LlamaBench
from quantizers import BY_PROGRAM, Quantizer, linear_bytes, quantizers
from reader import READER, SIZE, reader
from rotation import Timed
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, aoti_load_package

from benchmarking import Paired, Samples, paired, rounds_of

BF16 = "torch bf16"
#: what is decoded by one compiled program, too
COMPILED = (BF16, "ao int4 g32", "ao int8", "torchao int4 g32")
#: of such programs: below so many elements a thread, one does all, and none waits for another to begin
FEWEST_ELEMENTS = 4096
#: entries of the cache that such a program attends to: its shapes stay the same
SEEN = 64
#: longest that a contender decodes at a time, in seconds, once it has decoded a few tokens
LONGEST = 1.0
FEWEST = 2
#: tokens that are decoded at a time, and tokens of a prefill
TOKENS, TEXT = 16, 512
#: rounds of decoding, and of prefill
ROUNDS = (16, 5)


@dataclass
class TorchModel:
    """A decoder that torch runs, and its cache."""

    name: str
    model: Decoder
    dtype: torch.dtype
    #: of all weights that a token is multiplied by
    nbytes: int
    #: the model, or its compiled program for one token; and where the token at a position stands
    step: Callable[..., Tensor]
    place: Callable[[int], Place]
    #: seconds of the first token
    first: float = field(init=False)

    def __post_init__(self) -> None:
        self.cache = empty_cache(self.model.shape, self.dtype)
        self.rope = rope_table(self.model.shape, self.dtype)
        self.decode_some(FEWEST)
        self.first = self.decode_some(FEWEST)

    def decode(self, tokens: int) -> float:
        """Seconds a token when so many are generated from nothing; fewer by a slow contender."""
        return self.decode_some(max(FEWEST, min(tokens, int(LONGEST / self.first))))

    def prefill(self, tokens: int) -> float:
        """Seconds for a text of so many tokens."""
        text = self._random(tokens)
        start = time.perf_counter()
        self.model(text, self.cache, self.rope, after(0, tokens))
        return time.perf_counter() - start

    def decode_some(self, tokens: int) -> float:
        """Seconds a token when just so many are generated."""
        parts = self._random(tokens).split(1)
        start = time.perf_counter()
        for position, token in enumerate(parts):
            self.step(token, self.cache, self.rope, self.place(position))
        return (time.perf_counter() - start) / tokens

    def _random(self, tokens: int) -> Tensor:
        return torch.randint(0, self.model.shape.vocab, (tokens,))


Contender = TorchModel | LlamaBench
Maker = Callable[[], Contender]


def makers(llama: str, shape: Shape, threads: int) -> dict[str, Maker]:
    """Everything that can be timed here: name -> what makes it.

    Args:
        llama: a folder with llama.cpp's libraries and `llama-bench`, or "".
        shape: of the model.
        threads: of llama.cpp; the others take torch's.
    """
    # made once: its compiled program has the same weights
    eager: dict[str, Callable[[], TorchModel]] = {BF16: cache(partial(torch_model, shape, BF16))}
    for name, quantize in quantizers().items():
        eager[name] = cache(partial(torch_model, shape, name, quantize))
    programs = {n + BY_PROGRAM: partial(compiled, eager[n]) for n in COMPILED if n in eager}
    llamas = {
        f"llama.cpp {kind}": partial(LlamaBench, Path(llama), shape, kind, threads)
        for kind in (KINDS if llama else ())
    }
    return {**eager, **programs, **llamas}


def torch_model(shape: Shape, name: str, quantize: Quantizer | None = None) -> TorchModel:
    """The model in bfloat16, or what becomes of it."""
    model = random_model(shape)
    if quantize is not None:
        quantize(model)
    place = partial(after, tokens=1)
    return TorchModel(name, model, model.embedding.weight.dtype, linear_bytes(model), model, place)


def compiled(make: Callable[[], TorchModel]) -> TorchModel:
    """The same, but tokens are decoded by one program of AOTInductor, with a copy of the weights."""
    eager = make()
    name = eager.name + BY_PROGRAM
    step = program(eager.model, eager.dtype)
    return TorchModel(name, eager.model, eager.dtype, eager.nbytes, step, one_of_seen)


class Step(nn.Module):
    """The model on one token, whose place is given by tensors alone, as programs take them."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, token: Tensor, cache: list[Tensor], rope: Tensor, position: Tensor, mask: Tensor
    ) -> Tensor:
        found: Tensor = self.model(token, cache, rope, Place(position, SEEN, mask))
        return found


def program(model: Decoder, dtype: torch.dtype) -> Callable[..., Tensor]:
    """What takes a token, the cache, the rope and a place, as the model does."""
    # the inputs are written to, which tensors of inference mode allow nowhere else
    with torch.inference_mode(False), torch.no_grad():
        place = one_of_seen(0)
        given = empty_cache(model.shape, dtype), rope_table(model.shape, dtype)
        inputs = torch.tensor([0]), *given, place.positions, place.mask
        exported = torch.export.export(Step(model), inputs, strict=False)
        options = {"cpp.min_chunk_size": FEWEST_ELEMENTS}
        with TemporaryDirectory() as folder:
            package = str(Path(folder) / "step.pt2")
            aoti_compile_and_package(exported, package_path=package, inductor_configs=options)
            run = aoti_load_package(package)

    def step(token: Tensor, cache: list[Tensor], rope: Tensor, place: Place) -> Tensor:
        found: Tensor = run(token, cache, rope, place.positions, place.mask)
        return found

    return step


def one_of_seen(position: int) -> Place:
    """Where a token stands for a compiled program.

    Raises:
        ValueError: it attends to fewer entries of the cache.
    """
    if position >= SEEN:
        raise ValueError(f"position={position}: compiled programs see {SEEN} tokens")
    return anywhere(torch.tensor([position]), SEEN)


@dataclass(frozen=True)
class Results:
    """Seconds a token, and seconds of a prefill, of every contender in each round."""

    contenders: dict[str, Contender]
    decode: Samples
    prefill: Samples

    def share(self, name: str) -> Paired:
        """The part of the read rate at which weights are read while decoding."""
        return paired(self.decode, name, READER).scaled(self.contenders[name].nbytes / SIZE)


def measured(contenders: Iterable[Contender], tokens: int, percent: int = 100) -> Results:
    """Decode so many tokens at a time beside the reader, then a text, in that part of `ROUNDS`."""
    named = {contender.name: contender for contender in contenders}
    decode = {name: partial(c.decode, tokens) for name, c in named.items()}
    texts = {n: partial(c.prefill, TEXT) for n, c in named.items() if not n.endswith(BY_PROGRAM)}
    reading = {READER: Timed(reader().calls(1))}
    rounds, text_rounds = (max(1, count * percent // 100) for count in ROUNDS)
    return Results(named, rounds_of({**decode, **reading}, rounds), rounds_of(texts, text_rounds))
