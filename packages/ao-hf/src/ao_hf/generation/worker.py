"""A contender in a process of its own, so that its peak memory is its own; `python -m` runs it.

Reads lines of JSON: what to load, then one workload after the other. Answers each with a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any

from ao_core.ext import AoError
from ao_hf.generation.measuring import Sample, Workload, runner_of

__all__ = ["Worker", "main"]


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
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8"
        )
        try:
            self._ask(options)
        except BaseException:
            self.close()
            raise

    def __call__(self, workload: Workload) -> Sample:
        """Run a workload once."""
        return Sample(**self._ask(asdict(workload)))

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        answer = ""
        try:
            stdin.write(json.dumps(dict(message)) + "\n")
            stdin.flush()
            answer = stdout.readline()
        except BrokenPipeError:
            pass
        if not answer:
            code = self._process.wait()
            reason = "killed, perhaps for want of memory" if code < 0 else f"with exit code {code}"
            raise AoError(f"{self.name}: its process ended ({reason})")
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise AoError(f"{self.name}: {found['error']}")
        return found

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
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
    from ao_hf.generation.presets import random_model

    if preset:
        return runner_of(random_model(model, recipe, device=device, dtype=dtype), kv)

    with quiet():
        loaded = load(model, recipe, device=device, dtype=dtype, tokenizer=False)
        if dense and loaded.quantized:
            loaded.model.dequantize()
    return runner_of(loaded, kv)


def main() -> None:
    """Answer lines until there are no more."""
    # what libraries print must not come between the answers
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        warnings.simplefilter("ignore")
        run: Any = None
        for line in sys.stdin:
            options, found = json.loads(line), {}
            try:
                if run is None:
                    run = contender(**options)
                else:
                    found = asdict(run(Workload(**options)))
            except Exception as error:
                found = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
            answers.write(json.dumps(found) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
