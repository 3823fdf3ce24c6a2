"""The HTTP server of an app: its socket, and its thread next to a training."""

from __future__ import annotations

import socket
import threading

import uvicorn
from starlette.applications import Starlette

from jetrl.errors import UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def listen(host: str, port: int, where: str) -> socket.socket:
    """Return a socket that listens, or raise UserError, which begins with `where`."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{where}: {reason}; choose another port") from None


class ServerThread:
    """A server of an app in a thread, until `close`, which drops the requests that still run."""

    def __init__(self, app: Starlette, listening: socket.socket) -> None:
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name="jetrl-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
