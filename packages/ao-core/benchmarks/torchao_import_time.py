"""Import time over torch, of ao_core and of torchao."""

from __future__ import annotations

from import_time import STATEMENTS, TEXT, measure

from benchmarking import arguments, record

TORCHAO = {
    "import torchao": "import torchao",
    "import torchao.quantization": "import torchao.quantization",
}

if __name__ == "__main__":
    args = arguments(__doc__, rounds=15)
    title = "Import time, compared with torchao"
    record(args.json, title, TEXT, measure(args.rounds, STATEMENTS | TORCHAO))
