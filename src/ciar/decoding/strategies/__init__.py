"""The built-in strategies, one a file. Importing this package registers them."""

from ciar.decoding.strategies import base, ciar, device_only, lossless

__all__ = ["base", "ciar", "device_only", "lossless"]
