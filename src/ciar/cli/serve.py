"""``ciar serve``: the cloud's side over a WebSocket."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec

from ciar.cli.generate import TOKEN_VARIABLE
from ciar.cli.output import note
from ciar.cli.parser import Command, real, whole
from ciar.errors import InputError

#: Hosts that only this machine reaches; any other one deserves a token.
_LOCAL = ("127.0.0.1", "localhost", "::1")

EPILOG = """\
examples:
  ciar serve
  CIAR_TOKEN=... ciar serve --host 0.0.0.0 --port 8765 --max-sessions 16
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ciar serve``."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=whole(0, 65535), default=8765, metavar="N", help="0 takes a free one (default: 8765)"
    )
    parser.add_argument(
        "--backbone", default="emoji", metavar="NAME", help="a name or a folder (default: emoji)"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, mps (default: cpu)"
    )
    parser.add_argument(
        "--max-sessions", type=whole(1, 4096), default=8, metavar="N", help="pictures at once (default: 8)"
    )
    parser.add_argument(
        "--token", metavar="TEXT", help=f"what devices must send to be served (default: ${TOKEN_VARIABLE})"
    )
    parser.add_argument(
        "--idle-timeout",
        type=real(0.0, 86400.0, above=True),
        default=60.0,
        metavar="S",
        help="seconds after which a silent session ends (default: 60)",
    )


def run(options: argparse.Namespace) -> int:
    """Serves until it is stopped. Returns 0.

    Raises:
        InputError: the extra ``serve`` is not installed.
    """
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise InputError(f"ciar serve needs {' and '.join(missing)}. Install: pip install 'ciar[serve]'.")
    token = options.token if options.token is not None else os.environ.get(TOKEN_VARIABLE) or None
    if token == "":
        raise InputError("--token is empty. Give a token, or leave the option out to serve without one.")
    if token is None and options.host not in _LOCAL:
        note(f"warning: anyone who reaches {options.host} is served; set a token in ${TOKEN_VARIABLE}")
    note(f"loading {options.backbone} ...")
    serve_cloud(options, token)
    return 0


def serve_cloud(options: argparse.Namespace, token: str | None) -> None:
    """Loads the cloud and serves it; everything heavy is imported here."""
    from ciar.cloud.sessions import Cloud
    from ciar.serving.run import ServerConfig, serve

    def on_ready(url: str) -> None:
        note(f"serving {options.backbone} on {url}; stop with Ctrl-C")

    cloud = Cloud.from_pretrained(options.backbone, device=options.device)
    config = ServerConfig(max_sessions=options.max_sessions, token=token, idle_timeout_s=options.idle_timeout)
    serve(cloud, options.host, options.port, config, on_ready)


COMMAND = Command(
    help="serve a cloud model to devices",
    add_arguments=add_arguments,
    run=run,
    description='Serves a cloud model over a WebSocket to "ciar generate --cloud".',
    epilog=EPILOG,
)
