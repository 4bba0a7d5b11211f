"""A small client of the OpenAI API, as much of it as the command line needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx

from workers.engine.errors import ShoalError


class ClientError(ShoalError):
    """The server refused or could not be reached."""


class Client:
    """Talks to one endpoint, ``http://host:port/v1``, of which the path may be left out."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        url = url.rstrip("/")
        self._url = f"{url}/v1" if url.count("/") == 2 else url  # http://host:port, as one types it
        self._http = httpx.Client(timeout=httpx.Timeout(10.0, read=600.0), headers=headers)

    def first_model(self) -> str:
        """Name of the first model served.

        Raises:
            ClientError: nothing answers, or no model is served.
        """
        models = self._get("/models")["data"]
        if not models:
            raise ClientError(f"{self._url} serves no model")
        return str(models[0]["id"])

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
            with self._http.stream("POST", self._url + path, json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise ClientError(_message_of(answer))
                yield from _choices(answer)
        except httpx.HTTPError as error:
            raise ClientError(f"{self._url}: {error}") from error

    def _get(self, path: str) -> Any:
        try:
            answer = self._http.get(self._url + path)
        except httpx.HTTPError as error:
            raise ClientError(
                f"nothing answers at {self._url} ({error}): start it with `shoal serve`"
            ) from error
        if answer.status_code != 200:
            raise ClientError(_message_of(answer))
        return answer.json()


def _choices(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if not line.startswith("data: "):
            continue
        data = line[len("data: ") :]
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ClientError(event["error"]["message"])
        yield from event["choices"]
    raise ClientError("the stream broke off before its end")


def _message_of(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}: {answer.text[:200]}"
