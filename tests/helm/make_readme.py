"""Writes the table of values in the chart's README from the comments of values.yaml: ``python make_readme.py``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "helm"
BEGIN, END = "<!-- values -->", "<!-- end of values -->"


def rows(text: str) -> list[tuple[str, str, str]]:
    """Key, default and description of each commented value, and of those without a comment below none."""
    found: list[tuple[str, str, str]] = []
    path: list[str] = []
    words: list[str] = []
    for line in text.splitlines():
        comment = re.match(r"\s*# (-- )?(.*)", line)
        if comment:
            if comment.group(1):
                words = [comment.group(2)]
            elif words:
                words.append(comment.group(2))
            continue
        key = re.match(r"( *)([A-Za-z]\w*):", line)
        if key:
            path = [*path[: len(key.group(1)) // 2], key.group(2)]
            if words:
                found.append((".".join(path), "", " ".join(words)))
        words = []
    values = yaml.safe_load(text)
    return [(key, _default(values, key), description) for key, _, description in found]


def _default(values: Any, key: str) -> str:
    for part in key.split("."):
        values = values[part]
    return yaml.safe_dump(values, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


def table(text: str) -> str:
    """The table in Markdown."""
    lines = ["| value | default | what it does |", "| --- | --- | --- |"]
    lines += [f"| `{key}` | `{default}` | {words} |" for key, default, words in rows(text)]
    return "\n".join(lines)


def with_table(readme: str, text: str) -> str:
    """The README with the table of today."""
    head, _, rest = readme.partition(BEGIN)
    return f"{head}{BEGIN}\n{table(text)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    path = CHART / "README.md"
    path.write_text(with_table(path.read_text(), (CHART / "values.yaml").read_text()))
