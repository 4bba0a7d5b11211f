"""One pattern for many names, whose cost for a text does not grow with how many names there are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_END = ""
"""Key of a node at which a name ends; the others are characters."""


def longest_of(names: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the names, where several begin at one place the longest; of no names, nothing.

    The names are laid out as a trie: ``a|b|c`` of thousands of names would try each at every place.
    """
    root: dict[str, Any] = {}
    for name in names:
        node = root
        for char in name:
            node = node.setdefault(char, {})
        node[_END] = {}
    root.pop(_END, None)
    return re.compile(_pattern(root) if root else r"(?!)")


def _pattern(node: dict[str, Any]) -> str:
    branches = [re.escape(char) + _pattern(below) for char, below in node.items() if char != _END]
    if not branches:
        return ""
    if len(branches) == 1 and _END not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if _END in node else ''}"
