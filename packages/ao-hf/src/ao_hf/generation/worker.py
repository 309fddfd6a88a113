"""A contender in a process of its own, so that its peak memory is its own; `python -m` runs it.

Reads pickled records: what to load, then one workload after the other. Answers each with a record.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from ao_core.ext import AoError
from ao_hf.generation.measuring import runner_of
from ao_hf.generation.passes import pass_runner

__all__ = ["Worker", "contender", "main"]


class Worker:
    """Starts the process, and runs workloads there.

    Args:
        name: in errors.
        options: of `contender`.

    Raises:
        AoError: what happened there, or that it ended.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        command = [sys.executable, "-m", "ao_hf.generation.worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self(dict(options))
        except BaseException:
            self.close()
            raise

    def __call__(self, message: Any) -> Any:
        """Run a workload once."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            pickle.dump(message, stdin)
            stdin.flush()
            error, found = pickle.load(stdout)
        except (BrokenPipeError, EOFError):
            code = self._process.wait()
            reason = "killed, perhaps for want of memory" if code < 0 else f"with exit code {code}"
            raise AoError(f"{self.name}: its process ended ({reason})") from None
        if error:
            raise AoError(f"{self.name}: {error}")
        return found

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def contender(
    model: str,
    recipe: str | None,
    kv: str | None,
    device: str | None,
    dtype: str,
    dense: bool = False,
    preset: bool = False,
) -> Any:
    """Load a contender; `dense` undoes the quantization of a folder, and a preset is a name of `PRESETS`."""
    from ao_hf.commands.quiet import quiet
    from ao_hf.generation.models import load
    from ao_hf.generation.presets import find_preset, random_model

    if preset:
        loaded, forward = (
            random_model(model, recipe, device=device, dtype=dtype),
            find_preset(model).forward,
        )
        return runner_of(loaded, kv) if forward is None else pass_runner(loaded, forward)

    with quiet():
        loaded = load(model, recipe, device=device, dtype=dtype, tokenizer=False)
        if dense and loaded.quantized:
            loaded.model.dequantize()
    return runner_of(loaded, kv)


def main() -> None:
    """Answer messages until there are no more."""
    # what libraries print must not come between the answers
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        warnings.simplefilter("ignore")
        run: Any = None
        while True:
            try:
                message = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            error, found = "", None
            try:
                if run is None:
                    run = contender(**message)
                else:
                    found = run(message)
            except Exception as failure:
                error = " ".join(f"{type(failure).__name__}: {failure}".split())
            pickle.dump((error, found), answers)
            answers.flush()


if __name__ == "__main__":
    main()
