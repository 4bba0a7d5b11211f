"""The command line's own client."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from deploy.client import Client


class Models(BaseHTTPRequestHandler):
    """Serves one model at ``/v1``."""

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "tiny"}]}' if self.path == "/v1/models" else b'{"error": {"message": "no"}}'
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_path_of_an_endpoint_may_be_left_out(path: str) -> None:
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        assert Client(f"http://127.0.0.1:{server.server_port}{path}").first_model() == "tiny"

        server.shutdown()
