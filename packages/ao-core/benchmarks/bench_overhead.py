"""Eager overhead of a quantized linear layer over nn.Linear at batch 1."""

from __future__ import annotations

from overhead import TEXT, measure

from benchmarking import arguments, record

if __name__ == "__main__":
    args = arguments(__doc__, rounds=60, repeats=500)
    record(args.json, "Overhead of an eager call", TEXT, measure(args.rounds, args.repeats))
