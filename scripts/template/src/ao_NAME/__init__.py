"""SUMMARY"""

from ao_NAME.__about__ import __version__

__all__ = ["__version__"]
