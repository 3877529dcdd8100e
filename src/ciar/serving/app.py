"""The ASGI application: sessions at ``/v1/session``, health, metrics and a page for people.

The same application runs under uvicorn (``ciar.serving.run``) and inside any other ASGI server. Health and
metrics need no token: they hold no prompts, and probes cannot keep secrets.
"""

from __future__ import annotations

import html
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute

from ciar.protocol.messages import SUBPROTOCOL
from ciar.serving.config import ServerConfig
from ciar.serving.endpoint import Endpoint
from ciar.serving.metrics import CONTENT_TYPE
from ciar.transport.base import Cloud
from ciar.transport.websocket import SESSION_PATH
from ciar.version import __version__

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>ciar server</title>
</head>
<body>
<h1>ciar server</h1>
<p>This is the cloud's side of <b>ciar</b> {version}. It checks image tokens that devices draft, with the
backbone <b>{backbone}</b>. It makes no pictures by itself in a browser; a device does, for example:</p>
<pre>ciar generate --cloud {scheme}://{host} "a smiling cat with sunglasses"</pre>
<ul>
<li><code>{path}</code>: WebSocket, subprotocol <code>{subprotocol}</code></li>
<li><a href="livez">/livez</a>, <a href="readyz">/readyz</a>: health</li>
<li><a href="metrics">/metrics</a>: numbers for Prometheus</li>
</ul>
</body>
</html>
"""


def create_app(cloud: Cloud, config: ServerConfig | None = None) -> Starlette:
    """The application of one server. Each application is started once.

    Args:
        cloud: what opens sessions; must be ready.
        config: limits and the token; None is the defaults.

    Returns:
        An ASGI application. ``app.state.endpoint`` is its :class:`Endpoint`, with the metrics.
    """
    endpoint = Endpoint(cloud, config or ServerConfig())

    async def livez(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        body = {
            "ready": not endpoint.is_draining,
            "backbone": cloud.backbone,
            "weights": cloud.weights,
            "protocol": SUBPROTOCOL,
            "version": __version__,
            "sessions": endpoint.sessions,
            "max_sessions": endpoint.config.max_sessions,
        }
        return JSONResponse(body, 503 if endpoint.is_draining else 200)

    async def metrics(request: Request) -> Response:
        return Response(endpoint.metrics.render(), media_type=CONTENT_TYPE)

    async def page(request: Request) -> Response:
        words = {
            "version": __version__,
            "backbone": cloud.backbone,
            "scheme": "wss" if request.url.scheme == "https" else "ws",
            "host": request.headers.get("host", "host:port"),
            "path": SESSION_PATH,
            "subprotocol": SUBPROTOCOL,
        }
        return HTMLResponse(_PAGE.format(**{name: html.escape(word) for name, word in words.items()}))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        endpoint.shut_down()

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/livez", livez),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            WebSocketRoute(SESSION_PATH, endpoint.serve),
        ],
        lifespan=lifespan,
    )
    app.state.endpoint = endpoint
    return app
