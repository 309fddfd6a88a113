"""The version of ao-kernels; `nox -s release` sets it."""

__version__ = "0.1.0"
