"""The built-in strategies, one a file. Importing this package registers them."""

from ciar.decoding.strategies import (
    base,
    ciar,
    code,
    cool_sd,
    device_only,
    lantern,
    lossless,
    rows,
    scd,
    sjd,
    slack,
    speculative,
    vvs,
)

__all__ = [
    "base",
    "ciar",
    "code",
    "cool_sd",
    "device_only",
    "lantern",
    "lossless",
    "rows",
    "scd",
    "sjd",
    "slack",
    "speculative",
    "vvs",
]
