"""The calibration text on its way through a model, layer by layer: what each layer's projections see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class InputStatistics:
    """Sums over calibration tokens of one projection's inputs."""

    gram: Tensor
    """[in, in]: sums of products of three quarters of each text, to fit to."""
    held_out: Tensor
    """[in, in]: those of the last quarter, to judge by."""
    magnitudes: Tensor
    """[in]: sums of absolute values, divided by ``count`` when read."""
    count: int = 0

    @classmethod
    def empty(cls, width: int) -> InputStatistics:
        """Of no token."""
        return cls(torch.zeros(width, width), torch.zeros(width, width), torch.zeros(width))

    def add(self, inputs: Tensor) -> None:
        """Take in [..., in] inputs of consecutive tokens."""
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        fitted, held_out = rows.tensor_split([-(-3 * rows.shape[0] // 4)])
        self.gram.addmm_(fitted.t(), fitted)
        self.held_out.addmm_(held_out.t(), held_out)
        self.magnitudes += rows.abs().sum(0)
        self.count += rows.shape[0]


class _Reached(Exception):
    """The first layer was called; what comes after is not needed."""


class CalibrationFlow:
    """What enters the layer that comes next. A layer that was changed passes on what it computes since."""

    def __init__(self, model: nn.Module, first_layer: nn.Module, batches: Sequence[Tensor]) -> None:
        """Run ``batches`` of token ids [1, length] as far as ``first_layer``."""
        self._hidden: list[Tensor] = []
        self._arguments: list[dict[str, Any]] = []

        def catch(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            self._hidden.append(args[0].clone())
            self._arguments.append(kwargs)
            raise _Reached

        hook = first_layer.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            with torch.no_grad():
                for batch in batches:
                    try:
                        model(batch, use_cache=False)
                    except _Reached:
                        continue
        finally:
            hook.remove()

    def record(self, layer: nn.Module, names: Sequence[str]) -> dict[str, InputStatistics]:
        """What the projections ``names`` of ``layer``, which comes next, are given."""
        found: dict[str, InputStatistics] = {}

        def recorder(name: str) -> Callable[..., None]:
            def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                found.setdefault(name, InputStatistics.empty(args[0].shape[-1])).add(args[0])

            return record

        hooks = [layer.get_submodule(name).register_forward_pre_hook(recorder(name)) for name in names]
        try:
            self._run(layer)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def pass_through(self, layer: nn.Module) -> None:
        """Go on to the layer after ``layer``."""
        self._hidden = self._run(layer)

    @torch.no_grad()
    def _run(self, layer: nn.Module) -> list[Tensor]:
        outputs = []
        for hidden, arguments in zip(self._hidden, self._arguments, strict=True):
            output = layer(hidden, **arguments)
            outputs.append(output[0] if isinstance(output, tuple) else output)
        return outputs
