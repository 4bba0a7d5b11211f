"""A small client of the OpenAI API, as much of it as the command line needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import httpx

from deploy.lines import LineCutter, line_value
from deploy.silence import told_when_long
from workers.engine.errors import InvalidRequest, ShoalError

_CONNECT_S = 10.0
_SILENCE_S = _CONNECT_S + 1
"""Where nobody lets in, an error says so before."""
_Http = TypeVar("_Http", httpx.Client, httpx.AsyncClient)


class ClientError(ShoalError):
    """The server refused or could not be reached."""


class Client:
    """Talks to one endpoint, ``http://host:port/v1``, of which the path may be left out."""

    def __init__(self, url: str, api_key: str | None = None, silence_s: float = _SILENCE_S) -> None:
        """Connect to nothing yet.

        Args:
            silence_s: how long an answer may take to begin before the user is told that it has not.

        Raises:
            InvalidRequest: the URL or the key cannot be one, or the environment names what ``http_client`` refuses.
        """
        self._url = endpoint(url)
        self._silence_s = silence_s
        self._http = http_client(
            httpx.Client, timeout=httpx.Timeout(_CONNECT_S, read=600.0), headers=key_headers(api_key)
        )

    def first_model(self) -> str:
        """Name of the first model served.

        Raises:
            ClientError: nothing answers, or no model is served.
        """
        try:
            models = [str(model["id"]) for model in self._get("/models").json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise ClientError(f"what answers at {self._url} does not speak OpenAI's API") from None
        if not models:
            raise ClientError(f"{self._url} serves no model")
        return models[0]

    def stream_chat(self, model: str, messages: list[dict[str, str]], **options: Any) -> Iterator[str]:
        """Pieces of the assistant's next message as they come.

        Raises:
            ClientError: the request was refused, or the stream broke off.
        """
        body = {"model": model, "messages": messages, "stream": True, **options}
        for choice in self._stream("/chat/completions", body):
            if content := choice["delta"].get("content"):
                yield content

    def stream_completion(self, model: str, prompt: str, **options: Any) -> Iterator[str]:
        """Pieces of what follows the prompt, as they come.

        Raises:
            ClientError: the request was refused, or the stream broke off.
        """
        for choice in self._stream(
            "/completions", {"model": model, "prompt": prompt, "stream": True, **options}
        ):
            if choice["text"]:
                yield choice["text"]

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with ExitStack() as stack:
                with told_when_long(self._url, self._silence_s):
                    answer = stack.enter_context(self._http.stream("POST", self._url + path, json=body))
                if answer.status_code != 200:
                    answer.read()
                    raise ClientError(_message_of(answer))
                yield from _choices(answer)
        except UnicodeEncodeError:  # bytes of the command line that are no UTF-8
            raise InvalidRequest("the text or an option holds bytes that are no UTF-8", "prompt") from None
        except httpx.HTTPError as error:
            raise ClientError(f"{self._url} ended the stream before its end: {_told(error)}") from error

    def _get(self, path: str) -> httpx.Response:
        try:
            with told_when_long(self._url, self._silence_s):
                answer = self._http.get(self._url + path)
        except httpx.HTTPError as error:
            raise ClientError(_unreached(self._url, error)) from error
        if answer.status_code != 200:
            raise ClientError(_message_of(answer))
        return answer


def endpoint(url: str) -> str:
    """``http://host:port/v1`` of what was typed: the path may be left out.

    Raises:
        InvalidRequest: it is no such address.
    """
    try:
        parsed = httpx.URL(url.rstrip("/"))
    except (httpx.InvalidURL, UnicodeEncodeError):
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidRequest(
            f"--url {url!r} is no address of an endpoint: write it as http://HOST:PORT/v1", "url"
        )
    return f"{parsed}/v1" if parsed.path in ("", "/") else str(parsed)


def key_headers(api_key: str | None) -> dict[str, str]:
    """How a request shows its key.

    Raises:
        InvalidRequest: it holds what no header may.
    """
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequest(
            "the API key holds characters that no key has: only ASCII, on one line", "api_key"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def http_client(kind: Callable[..., _Http], **options: Any) -> _Http:
    """A client of httpx, which reads certificates and proxies from the environment.

    Raises:
        InvalidRequest: what stands there cannot be used.
    """
    try:
        return kind(**options)
    except OSError as error:  # ssl's errors are such, too
        named = os.environ.get("SSL_CERT_FILE", "")
        raise InvalidRequest(
            f"SSL_CERT_FILE is {named!r}, which holds no certificates that can be read: {error.strerror or error}",
            "SSL_CERT_FILE",
        ) from None
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        raise InvalidRequest(
            f"a proxy that the environment names (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY) cannot be used: {error}",
            "proxy",
        ) from None


def _choices(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for data in _events(answer):
        if data == "[DONE]":
            return
        try:
            event = line_value(data)
        except ValueError:
            raise ClientError(f"the stream holds what is no JSON: {data[:80]}") from None
        if "error" in event:
            raise ClientError(event["error"]["message"])
        yield from event["choices"]
    raise ClientError("the stream broke off before its end")


def _events(answer: httpx.Response) -> Iterator[str]:
    cutter = LineCutter()
    for piece in answer.iter_bytes():
        for line in cutter.feed(piece):
            if line.startswith("data: "):
                yield line[len("data: ") :]


def _unreached(url: str, error: httpx.HTTPError) -> str:
    told = _told(error)
    if "CERTIFICATE_VERIFY_FAILED" in told:
        return f"the certificate of {url} is not trusted here: if it is yours, name its file by SSL_CERT_FILE"
    if isinstance(error, httpx.ConnectError):
        return f"nothing answers at {url} ({told}): start it with `shoal serve`"
    return f"what answers at {url} is no endpoint ({told}): is it https, and the port right?"


def _told(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _message_of(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}: {answer.text[:200]}"
