"""Files and ledgers of a benchmark that nobody ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import write_wide_bundle


def picture(rtt_ms: float, number: int, row: str, total_ms: float, **more: Any) -> dict[str, Any]:
    """A line of the file."""
    ledger = {
        "tokens": 16, "cloud_passes": 4, "token_rows": 24, "cloud_ms": 50.0, "device_ms": 8.0,
        "total_ms": total_ms, "critical_round_trips": 2, "bytes_up": 300, "bytes_down": 500,
    }  # fmt: skip
    ledger |= {name: more.pop(name) for name in list(more) if name in ledger}
    which = {"rtt_ms": rtt_ms, "picture": number, "row": row, "go": "a", "prompt": "cat", "seed": number}
    shot = {"ledger": ledger, "digest": "d", "positions": 3, "guided": 2, "strategy": row, "why": ""}
    return which | shot | {"proposals": 0} | more


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench-stream") / "wide"
    write_wide_bundle(folder)
    return folder
