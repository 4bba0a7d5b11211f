"""What a model's linear layers see on a text: products and magnitudes of their inputs, some layers at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class InputStatistics:
    """Sums over calibration tokens of one layer's inputs."""

    gram: Tensor
    """[in, in]: sums of products of three quarters of each text, to fit to."""
    held_out: Tensor
    """[in, in]: those of the last quarter, to judge by."""
    magnitudes: Tensor
    """[in]: sums of absolute values, divided by ``count`` when read."""
    count: int = 0

    def add(self, inputs: Tensor) -> None:
        """Take in [..., in] inputs of consecutive tokens."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        fitted, held_out = rows.tensor_split([-(-3 * rows.shape[0] // 4)])
        self.gram.addmm_(fitted.t(), fitted)
        self.held_out.addmm_(held_out.t(), held_out)
        self.magnitudes += rows.abs().sum(0)
        self.count += rows.shape[0]


@contextmanager
def _recording(layers: dict[str, nn.Linear]) -> Iterator[dict[str, InputStatistics]]:
    found: dict[str, InputStatistics] = {}
    hooks = []

    def recorder(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            width = args[0].shape[-1]
            if name not in found:
                found[name] = InputStatistics(
                    torch.zeros(width, width), torch.zeros(width, width), torch.zeros(width)
                )
            found[name].add(args[0])

        return record

    for name, layer in layers.items():
        hooks.append(layer.register_forward_pre_hook(recorder(name)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def record_inputs(
    model: nn.Module, layers: dict[str, nn.Linear], batches: list[Tensor]
) -> dict[str, InputStatistics]:
    """Run ``batches`` of token ids [1, length] through ``model`` and return what each of ``layers`` saw."""
    with _recording(layers) as found, torch.inference_mode():
        for batch in batches:
            model(batch, use_cache=False)
    return found
