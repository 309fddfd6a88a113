"""The version of ao-optim; `nox -s release` sets it."""

__version__ = "0.1.0"
