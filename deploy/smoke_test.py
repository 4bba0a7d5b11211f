"""Does an endpoint serve what it should? ``python -m deploy.smoke_test --url URL --model NAME``; for `helm test`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import httpx

from deploy.durations import seconds


def complaint(url: str, models: list[str], api_key: str | None) -> str | None:
    """What is wrong with the endpoint, or None: each model is listed and answers with a token."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=120.0) as client:
        try:
            listed = client.get("/v1/models")
            if listed.status_code != 200:
                return f"/v1/models answers {listed.status_code}: {listed.text[:300]}"
            names = {one["id"] for one in listed.json()["data"]}
            for model in models:
                if model not in names:
                    return f"{model} is not listed; there are {', '.join(sorted(names)) or 'none'}"
                body = {"model": model, "prompt": "Hello", "max_tokens": 1}
                answer = client.post("/v1/completions", json=body)
                if answer.status_code != 200:
                    return f"{model} answers {answer.status_code}: {answer.text[:300]}"
                if answer.json()["usage"]["completion_tokens"] != 1:
                    return f"{model} gave no token: {answer.text[:300]}"
        except httpx.HTTPError as error:
            return f"{url} cannot be reached: {error}"
    return None


def main() -> None:
    """Ask until all is well or time is up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--wait-s", type=seconds, default=60.0)
    options = parser.parse_args()
    api_key = options.api_key_file.read_text().strip() if options.api_key_file else None
    deadline = time.monotonic() + options.wait_s
    while (wrong := complaint(options.url, options.model, api_key)) and time.monotonic() < deadline:
        time.sleep(2.0)
    print(wrong or f"{', '.join(options.model)}: all answer")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
