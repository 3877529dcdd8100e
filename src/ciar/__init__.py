"""Autoregressive image models made fast across a device and a cloud.

``ciar.Pipeline`` makes pictures; everything else is in the subpackages. Importing ``ciar`` alone
loads no heavy library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ciar.errors import CiarError
from ciar.version import __version__

if TYPE_CHECKING:
    from ciar.pipeline import Pipeline, PipelineOutput

__all__ = ["CiarError", "Pipeline", "PipelineOutput", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("Pipeline", "PipelineOutput"):
        from ciar import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'ciar' has no attribute {name!r}")
