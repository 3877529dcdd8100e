"""The cloud of the benchmark in a process of its own: what ``ciar serve`` runs, if need be with a tempo.

``python -m ciar.bench_stream.server`` reads its order as one JSON line, answers with its address, and
serves until its standard input ends.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ciar.errors import CiarError


def main() -> int:
    """Serves. Returns 0."""
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    try:
        _serve(order)
    except CiarError as error:
        _say({"error": str(error)})
        return error.exit_code
    return 0


def _serve(order: dict[str, Any]) -> None:
    import torch

    from ciar.cloud.paced import Tempo, pace
    from ciar.cloud.sessions import Cloud
    from ciar.serving.run import BackgroundServer

    if order["threads"] is not None:
        torch.set_num_threads(order["threads"])
    cloud = Cloud.from_pretrained(order["backbone"], device=order["device"])
    if order["tempo"] is not None:
        pace(cloud, Tempo(**order["tempo"]))
    with BackgroundServer(cloud, host=order["host"]) as server:
        _say({"url": server.url})
        sys.stdin.read()


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
