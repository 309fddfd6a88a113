"""`ao generate`: text from a model, as it comes; or a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ao_hf.generation import Loaded, Written

__all__ = ["generate"]


def generate(
    model: str = typer.Argument(
        metavar="MODEL",
        help="A folder, dense or quantized by ao, a GGUF file, or ORG/NAME of the Hub.",
    ),
    prompt: str | None = typer.Argument(
        None, help="The text; - reads it from the standard input. Without it: a conversation."
    ),
    recipe: str | None = typer.Option(
        None, help="Quantize by this recipe while loading (see ao formats)."
    ),
    kv: str | None = typer.Option(
        None,
        help="Recipe of the cache of keys and values, such as kv8, or the file of a plan, PLAN.json.",
    ),
    draft: str | None = typer.Option(
        None,
        help="Recipe of a draft of the same model, which proposes tokens: int8 for a dense model, nibbles "
        "for one in int8; or lookup, which takes them from the text before.",
    ),
    compiled: bool = typer.Option(False, "--compile", help="Compile the steps of decoding."),
    max_new_tokens: int = typer.Option(256, min=1, help="At most so many tokens."),
    temperature: float = typer.Option(
        0.0, help="0 takes the likeliest token; above, tokens are drawn."
    ),
    top_k: int = typer.Option(0, help="Draw from so many of the likeliest tokens; 0: from all."),
    top_p: float = typer.Option(1.0, help="Draw from the likeliest tokens of this probability."),
    seed: int | None = typer.Option(None, help="Of the draws: the same seed gives the same text."),
    chat: bool | None = typer.Option(
        None,
        "--chat/--no-chat",
        help="Put the prompt into the chat template, or not. [default: if there is one]",
    ),
    system: str = typer.Option("", help="A system message for the conversation."),
    device: str | None = typer.Option(
        None, help="cpu, cuda, … [default: the accelerator, if there is one]"
    ),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16 or float16."),
) -> None:
    """Generate text with a model, and stream it; the last line, on stderr, says how fast it came.

    Without PROMPT, in a terminal, it is a conversation, which an empty line or Ctrl-D ends.
    """
    from ao_core.ext import ConfigError
    from ao_hf.commands.quiet import quiet

    text = _prompt(prompt)
    with quiet():
        from ao_hf.fusing.apply import fuse
        from ao_hf.generation import Sampling, draft_of, load
        from ao_hf.generation.caches import read_kv
        from ao_hf.generation.drafting import LOOKUP

        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "sampling": Sampling(temperature, top_k, top_p, seed),
            "kv": read_kv(kv),
            "compiled": compiled,
            "system": system,
        }
        loaded = load(model, recipe, device=device, dtype=dtype)
        if loaded.quantized:
            fuse(loaded.model)
        if draft == LOOKUP:
            options["draft"] = draft
        elif draft is not None:
            options["draft"] = draft_of(loaded, draft)
            fuse(options["draft"].model)
        if text is not None:
            typer.echo(str(_stream(loaded, text, options | {"chat": chat})), err=True)
            return
        if chat is False:
            raise ConfigError(
                "--no-chat: a conversation needs the chat template; give a PROMPT to continue"
            )
        _converse(loaded, options)


def _prompt(prompt: str | None) -> str | None:
    """The text to continue; None for a conversation."""
    from ao_core.ext import ConfigError

    if prompt == "-":
        prompt = sys.stdin.read()
        if not prompt.strip():
            raise ConfigError("PROMPT -: the standard input is empty")
    if prompt is None and not _is_terminal():
        raise ConfigError(
            "PROMPT is missing, and there is no terminal to ask in; - reads the standard input"
        )
    return prompt


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _stream(loaded: Loaded, prompt: Any, options: dict[str, Any]) -> Written:
    """Write an answer to the standard output, piece by piece."""
    from ao_hf.generation import generate

    written = generate(loaded, prompt, on_text=_write, **options)
    typer.echo()
    return written


def _write(text: str) -> None:
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _converse(loaded: Loaded, options: dict[str, Any]) -> None:
    """Ask and answer, the whole conversation being the prompt of each answer."""
    turns: list[dict[str, str]] = []
    while True:
        try:
            asked = input("> ").strip()
        except EOFError:
            typer.echo()
            return
        if not asked:
            return
        turns.append({"role": "user", "content": asked})
        written = _stream(loaded, list(turns), options)
        turns.append({"role": "assistant", "content": written.text})
        typer.echo(str(written), err=True)
