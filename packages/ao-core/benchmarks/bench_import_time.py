"""Import time of ao_core over torch."""

from __future__ import annotations

from import_time import STATEMENTS, TEXT, measure

from benchmarking import arguments, record

if __name__ == "__main__":
    args = arguments(__doc__, rounds=15)
    record(args.json, "Import time", TEXT, measure(args.rounds, STATEMENTS))
