"""llama.cpp on a model of the decoder's shape: its own benchmark, on a file of random weights."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workspace import ROOT

if TYPE_CHECKING:
    from decoder import Shape

#: type -> numbers of a block in bytes after its float16 scale, and a scale that gives weights of 0.02
KINDS = {"Q4_0": (16, 0.005), "Q8_0": (32, 0.0003)}
BLOCK = 32


def version(llama: str) -> dict[str, str]:
    """The version of the libraries in a folder, or nothing where there is none."""
    if not llama:
        return {}
    return {"llama.cpp": (Path(llama) / "libllama.so").resolve().name.removeprefix("libllama.so.")}


class LlamaBench:
    """The program `llama-bench`, and a model file for it.

    Args:
        folder: of the program.
        shape: of the model.
        kind: of its matrices, one of `KINDS`.
        threads: how many.
        kv: type of keys and values; "": float16. Values in few bits need `flash`.
        flash: whether attention is one operation: "on", "off", or "auto", the program's default.
    """

    def __init__(
        self, folder: Path, shape: Shape, kind: str, threads: int, kv: str = "", flash: str = "auto"
    ) -> None:
        self.name = f"llama.cpp {kind}"
        self.command = [folder / "llama-bench", "-m", model_file(shape, kind), "-t", str(threads)]
        self.command += ["-r", "1", "-o", "jsonl", "-fa", "on" if kv else flash]
        if kv:
            self.command += ["-ctk", kv, "-ctv", kv]
        block = KINDS[kind][0] + 2
        self.nbytes = sum(n * k for n, k in matrices(shape).values()) // BLOCK * block

    def decode(self, tokens: int, context: int = 0) -> float:
        """Seconds a token when so many are generated after a context."""
        return self._seconds("-p", "0", "-n", str(tokens), "-d", str(context)) / tokens

    @contextmanager
    def decoding(self, tokens: int, context: int, calls: int) -> Iterator[Callable[[], float]]:
        """A function that measures the seconds a token after a context; it can be called so often.

        The context is computed once, before the first call. Between calls the program is stopped.
        """
        tests = ",".join([str(tokens)] * (calls + 1))
        command = [*self.command, "-p", "0", "-n", tests, "-d", str(context)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as program:
            assert program.stdout is not None

            def measure() -> float:
                program.send_signal(signal.SIGCONT)
                line = program.stdout.readline()  # type: ignore[union-attr]
                # before it measures again it copies the state of the context, which takes longer than this
                program.send_signal(signal.SIGSTOP)
                if not line:
                    raise SystemExit(
                        f"error: {shlex.join(map(str, command))} ended with status {program.wait()}"
                    )
                return float(json.loads(line)["avg_ns"]) / 1e9 / tokens

            try:
                measure()
                yield measure
            finally:
                program.kill()

    def prefill(self, tokens: int) -> float:
        """Seconds for a text of so many tokens."""
        return self._seconds("-p", str(tokens), "-n", "0")

    def _seconds(self, *options: str) -> float:
        done = subprocess.run([*self.command, *options], check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        return float(found["avg_ns"]) / 1e9


def matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """Name in the file -> (rows, columns), of every matrix that a token is multiplied by."""
    keys = shape.kv_heads * shape.head_dim
    block = {
        "attn_q": (shape.dim, shape.dim),
        "attn_k": (keys, shape.dim),
        "attn_v": (keys, shape.dim),
        "attn_output": (shape.dim, shape.dim),
        "ffn_gate": (shape.ffn, shape.dim),
        "ffn_up": (shape.ffn, shape.dim),
        "ffn_down": (shape.dim, shape.ffn),
    }
    found = {f"blk.{i}.{name}": size for i in range(shape.layers) for name, size in block.items()}
    return found | {"output": (shape.vocab, shape.dim)}


def model_file(shape: Shape, kind: str) -> Path:
    """A GGUF file of the shape with random blocks of one type, written once."""
    sizes = f"{shape.layers}-{shape.dim}-{shape.ffn}-{shape.vocab}-{shape.context}"
    path = ROOT / "build" / "bench" / f"decoder-{sizes}-{kind}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        _write(part, shape, kind)
        part.rename(path)
    return path


def _write(path: Path, shape: Shape, kind: str) -> None:
    import gguf

    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    norms = [f"blk.{i}.{name}_norm" for i in range(shape.layers) for name in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(shape.dim, dtype=np.float32))
    random = np.random.default_rng(0)
    for name, size in (matrices(shape) | {"token_embd": (shape.vocab, shape.dim)}).items():
        data = _blocks(random, size, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(random: np.random.Generator, size: tuple[int, int], kind: str) -> Any:
    """(rows, bytes of a row): blocks of a float16 scale and random codes."""
    nbytes, scale = KINDS[kind]
    rows, columns = size
    data = random.integers(0, 256, (rows, columns // BLOCK, 2 + nbytes), dtype=np.uint8)
    data[..., :2] = np.array([scale], dtype=np.float16).view(np.uint8)
    return data.reshape(rows, -1)
