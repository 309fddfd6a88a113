"""When tokens came: a streamer for `model.generate`, and what follows from its times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.generation.streamers import BaseStreamer, TextStreamer

__all__ = ["Clock", "Timing"]


@dataclass(frozen=True)
class Timing:
    """When the tokens of one call came.

    Attributes:
        tokens: per row of the batch, that of the prefill included.
        rows: of the batch.
        first: tokens that came at once with the first; more than one where they were drafted.
        seconds_to_first: from the call to the first token, the prefill.
        seconds_after: from there to the last one.
        steps: how many times tokens came.
    """

    tokens: int
    rows: int
    first: int
    seconds_to_first: float
    seconds_after: float
    steps: int

    @property
    def decode_rate(self) -> float:
        """Tokens per second of all rows, without those of the prefill; 0 where there are no others."""
        made = self.rows * (self.tokens - self.first)
        return made / self.seconds_after if made and self.seconds_after else 0.0


class Clock(BaseStreamer):
    """Notes when tokens come, and passes them on to a streamer of text.

    Args:
        text: called with each piece of text as soon as it is settled; None: no text is made.
        tokenizer: that decodes the tokens.
    """

    def __init__(self, text: Callable[[str], None] | None = None, tokenizer: Any = None) -> None:
        self._text = None if text is None else _Text(tokenizer, text)
        self._times = [time.perf_counter()]
        self._counts: list[int] = []
        self._rows = 1
        self._started = False

    def put(self, value: Any) -> None:
        """Take the prompt, then tokens as they come: (rows,) or (1, tokens)."""
        if not self._started:
            self._started = True
            self._rows = value.shape[0]
            return
        self._times.append(time.perf_counter())
        self._counts.append(value.numel() // self._rows)
        if self._text is not None:
            self._text.put(value.reshape(-1))

    def end(self) -> None:
        """The last token came."""
        if self._text is not None:
            self._text.end()

    def timing(self) -> Timing:
        """What came when."""
        first = self._counts[0] if self._counts else 0
        after = self._times[-1] - self._times[min(1, len(self._times) - 1)]
        to_first = self._times[1] - self._times[0] if self._counts else 0.0
        return Timing(sum(self._counts), self._rows, first, to_first, after, len(self._counts))


class _Text(TextStreamer):
    """Text of whole words, for a function instead of the standard output."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass on what will not change any more."""
        if text:
            self._write(text)
