"""The version of ao-sparsity; `nox -s release` sets it."""

__version__ = "0.1.0"
