"""The version of ao-quant; `nox -s release` sets it."""

__version__ = "0.1.0"
