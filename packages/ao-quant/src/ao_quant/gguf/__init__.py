"""The block formats of GGUF, and reading and writing files of them (extra ``ao-quant[gguf]``)."""

from __future__ import annotations

from ao_quant.gguf.imatrix import Imatrix, imatrix_of, read_imatrix, write_imatrix
from ao_quant.gguf.read import GGUFFile, GGUFHeader, GGUFInfo, read_gguf, read_gguf_header
from ao_quant.gguf.write import write_gguf

__all__ = [
    "GGUFFile",
    "GGUFHeader",
    "GGUFInfo",
    "Imatrix",
    "imatrix_of",
    "read_gguf",
    "read_gguf_header",
    "read_imatrix",
    "write_gguf",
    "write_imatrix",
]
