"""Load a checkpoint of the demo in a process of its own and embed some texts with it."""

from __future__ import annotations

import argparse
from pathlib import Path

from minilm_demo import minilm
from safetensors.torch import load_file, save_file

from ao_core import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder that save_model wrote")
    parser.add_argument("tokens", type=Path, help="safetensors file with token ids and their mask")
    parser.add_argument("vectors", type=Path, help="safetensors file to write")
    args = parser.parse_args()

    model = minilm.empty()  # parameters on the meta device: no memory until they are loaded
    load_model(model, args.checkpoint)
    tokens = load_file(args.tokens)
    batch = minilm.Batch(tokens["ids"], tokens["mask"], tokens["rows"])
    save_file({"vectors": minilm.embed(model, batch)}, args.vectors)


if __name__ == "__main__":
    main()
