"""The block formats of GGUF, and reading and writing files of them (extra ``ao-quant[gguf]``)."""

from __future__ import annotations

from ao_quant.gguf.read import GGUFFile, read_gguf
from ao_quant.gguf.write import write_gguf

__all__ = ["GGUFFile", "read_gguf", "write_gguf"]
