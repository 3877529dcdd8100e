"""The tiny LlamaGen in place of the public sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny_llamagen

from ciar.models import presets


@pytest.fixture(autouse=True)
def tiny_presets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(presets.PRESETS)
    presets.PRESETS.clear()
    presets.PRESETS.update(tiny_llamagen.PRESETS)
    yield
    presets.PRESETS.clear()
    presets.PRESETS.update(before)
