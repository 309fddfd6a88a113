"""A time in which transformers writes no bars and no advice between the lines of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

__all__ = ["quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """Errors of transformers only, and no bars; as it was afterwards."""
    if find_spec("transformers") is None:
        yield
        return
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
