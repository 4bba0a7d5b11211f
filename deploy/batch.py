"""Batches as OpenAI's files have them: requests in a file, answers in another.

A line of the input is ``{"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}``, a line of the
output ``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from deploy.client import endpoint, http_client, key_headers
from deploy.lines import file_lines, line_value
from deploy.output_file import replace_at_end
from workers.engine.errors import InvalidRequest

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_RETRIED = (429, 503)
_MAX_RETRIES = 8
_MOST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(slots=True)
class BatchSummary:
    """How a batch went."""

    num_answered: int = 0
    """Answers with status 200."""
    num_failed: int = 0


def read_batch(path: Path) -> list[BatchRequest]:
    """Read and check a whole file before anything is sent.

    Raises:
        InvalidRequest: the file cannot be read, or a line of it is no request; its number is named.
    """
    lines = file_lines(path, "input_file")
    requests = [_request(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    seen: set[str] = set()
    for request in requests:
        if request.custom_id in seen:
            raise InvalidRequest(
                f"{path} has two requests with custom_id {request.custom_id!r}", "input_file"
            )
        seen.add(request.custom_id)
    if not requests:
        raise InvalidRequest(f"{path} holds no requests", "input_file")
    return requests


async def run(
    requests: list[BatchRequest],
    output: Path,
    url: str,
    api_key: str | None,
    concurrency: int,
    transport: httpx.AsyncBaseTransport | None = None,
) -> BatchSummary:
    """Send all requests, at most ``concurrency`` at once, and write each answer as it comes.

    Answers lie beside ``output`` until all are there (``replace_at_end``).

    Args:
        url: the endpoint, ending in ``/v1``.
        transport: how to reach it, for tests; None: over the network.
    """
    root = endpoint(url).removesuffix("/v1")
    headers = key_headers(api_key)
    waiting = iter(requests)
    summary = BatchSummary()
    with (
        replace_at_end(output, "--output-file") as file,
        tqdm(total=len(requests), desc="Requests", dynamic_ncols=True) as bar,
    ):
        async with http_client(
            httpx.AsyncClient,
            base_url=root,
            headers=headers,
            transport=transport,
            timeout=httpx.Timeout(30.0, read=None, pool=None),
            limits=httpx.Limits(max_connections=concurrency),
        ) as client:

            async def work() -> None:
                for request in waiting:
                    record, is_good = await _answer(client, request)
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    summary.num_answered += is_good
                    summary.num_failed += not is_good
                    bar.update()

            await asyncio.gather(*(work() for _ in range(min(concurrency, len(requests)))))
    return summary


async def _answer(client: httpx.AsyncClient, request: BatchRequest) -> tuple[dict[str, Any], bool]:
    record: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id}
    for attempt in range(_MAX_RETRIES + 1):
        try:
            answer = await client.post(request.url, json=request.body)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            return {**record, "response": None, "error": {"code": "unreachable", "message": reason}}, False
        if answer.status_code not in _RETRIED or attempt == _MAX_RETRIES:
            break
        asked_s = answer.headers.get("retry-after", "")
        await asyncio.sleep(
            min(max(float(asked_s) if asked_s.isdigit() else 0.0, 0.1 * 2**attempt), _MOST_WAIT_S)
        )
    response = {
        "status_code": answer.status_code,
        "request_id": answer.headers.get("x-request-id", ""),
        "body": _body_of(answer),
    }
    return {**record, "response": response, "error": None}, answer.status_code == 200


def _body_of(answer: httpx.Response) -> object:
    """What was answered; as text where that is no JSON, a proxy's page say."""
    try:
        return line_value(answer.text)
    except ValueError:
        return answer.text


def _request(path: Path, number: int, line: str) -> BatchRequest:
    def wrong(what: str) -> InvalidRequest:
        return InvalidRequest(f"{path}, line {number}: {what}", "input_file")

    try:
        value = line_value(line)
    except ValueError as error:
        raise wrong(str(error)) from None
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        raise wrong("a request is an object with custom_id, method, url and body")
    if not isinstance(value.get("custom_id"), str):
        raise wrong("custom_id must be text")
    if value.get("method", "POST") != "POST" or value.get("url") not in URLS:
        raise wrong(
            f"{value.get('method')} {value.get('url')} is not served in batches: POST to one of {', '.join(URLS)}"
        )
    if value["body"].get("stream"):
        raise wrong("stream has no meaning in a batch: leave it out")
    return BatchRequest(value["custom_id"], value["url"], value["body"])
