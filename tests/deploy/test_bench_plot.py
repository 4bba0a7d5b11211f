"""The plot of kernels is an SVG with a bar for each, as long as its share of the floor."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from deploy.bench.plot import write_shares


def test_each_kernel_has_a_bar_as_long_as_its_share(tmp_path: Path) -> None:
    kernels = [
        {"kernel": "gate & up", "size": "1 row", "us": 56.8, "floor_us": 55.1, "share_of_floor": 0.5},
        {"kernel": "logits", "size": "1 row", "us": 240.0, "floor_us": 246.0, "share_of_floor": 1.02},
    ]

    write_shares(tmp_path / "kernels.svg", "Llama <8B>", kernels)

    root = ElementTree.parse(tmp_path / "kernels.svg").getroot()
    texts = [node.text for node in root if node.tag.endswith("text")]
    assert texts == [
        "Llama <8B>",
        "gate & up, 1 row",
        "50% of floor, 56.8 us",
        "logits, 1 row",
        "102% of floor, 240.0 us",
    ]
    bars = [node for node in root if node.tag.endswith("rect") and node.get("x")]
    widths = [float(node.get("width", "0")) for node in bars]
    full, half, _, capped = widths
    assert half == full / 2
    assert capped == full
