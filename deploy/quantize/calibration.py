"""The calibration text on its way through a model, layer by layer, once in full and once through rounded layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workers.engine.errors import InvalidRequest

Rounding = Callable[[Tensor], Tensor]
"""What becomes of activations before they are multiplied."""


@dataclass(slots=True)
class InputStatistics:
    """Sums over calibration tokens of one projection's inputs: as rounded layers give them, and as full ones do.

    "To fit" are three quarters of each text, "to judge by" its last quarter.
    """

    gram: Tensor
    """[in, in]: products of rounded inputs, to fit to."""
    held_out: Tensor
    """[in, in]: the same to judge by."""
    drift: Tensor
    """[in, in]: products of full less rounded inputs with rounded inputs, to fit to."""
    held_out_drift: Tensor
    """[in, in]: the same to judge by."""
    magnitudes: Tensor
    """[in]: sums of absolute values of rounded inputs, divided by ``count`` when read."""
    count: int = 0

    @classmethod
    def empty(cls, width: int) -> InputStatistics:
        """Of no token."""
        gram, held_out, drift, held_out_drift = torch.zeros(4, width, width)
        return cls(gram, held_out, drift, held_out_drift, torch.zeros(width))

    def add(self, inputs: Tensor, full: Tensor) -> None:
        """Take in [..., in] inputs of consecutive tokens, and what they are in full."""
        rows, full_rows = (each.detach().reshape(-1, each.shape[-1]).float() for each in (inputs, full))
        cut = -(-3 * rows.shape[0] // 4)
        for part, gram, drift in (
            (slice(cut), self.gram, self.drift),
            (slice(cut, None), self.held_out, self.held_out_drift),
        ):
            gram.addmm_(rows[part].t(), rows[part])
            drift.addmm_((full_rows[part] - rows[part]).t(), rows[part])
        self.magnitudes += rows.abs().sum(0)
        self.count += rows.shape[0]

    @property
    def is_finite(self) -> bool:
        """False if inputs, or their squares, were beyond float32."""
        sums = (self.gram, self.held_out, self.drift, self.held_out_drift)
        return all(bool(torch.isfinite(one).all()) for one in sums)


class _Reached(Exception):
    """A module was called; what comes after is not needed."""


class CalibrationFlow:
    """What enters the layer that comes next. A layer that was changed passes on what it computes since."""

    def __init__(
        self,
        model: nn.Module,
        first_layer: nn.Module,
        batches: Sequence[Tensor],
        rounding: Rounding | None = None,
    ) -> None:
        """Run ``batches`` of token ids [1, length] as far as ``first_layer``.

        Args:
            rounding: of the inputs of all projections, where the rounded model is to be served so.
        """
        self._full: list[Tensor] = []
        self._arguments: list[dict[str, Any]] = []
        self._rounding = rounding
        self._num_passed = 0
        """Layers."""

        def catch(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            self._full.append(args[0].clone())
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
        self._hidden = list(self._full)

    def record(self, layer: nn.Module, full_layer: nn.Module, name: str) -> InputStatistics:
        """What the projection ``name`` of ``layer``, which comes next, is given, and is given in ``full_layer``.

        Raises:
            InvalidRequest: that, or its squares, are no finite numbers.
        """
        found: InputStatistics | None = None
        for hidden, full, arguments in zip(self._hidden, self._full, self._arguments, strict=True):
            with self._rounded_inputs(layer):
                inputs = _input_of(layer, name, hidden, arguments)
            in_full = _input_of(full_layer, name, full, arguments)
            found = found or InputStatistics.empty(inputs.shape[-1])
            found.add(inputs if self._rounding is None else self._rounding(inputs), in_full)
        assert found is not None, "a calibration has texts"
        if not found.is_finite:
            raise InvalidRequest(
                f"what model.layers.{self._num_passed}.{name}.weight is multiplied with is beyond float32: weights "
                "before it are far too large, or damaged",
                "model",
            )
        return found

    def pass_through(self, layer: nn.Module, full_layer: nn.Module) -> None:
        """Go on to the layer after ``layer``, which is ``full_layer`` rounded."""
        with self._rounded_inputs(layer):
            self._hidden = self._run(layer, self._hidden)
        self._full = self._run(full_layer, self._full)
        self._num_passed += 1

    @torch.no_grad()
    def _run(self, layer: nn.Module, batches: Sequence[Tensor]) -> list[Tensor]:
        outputs = []
        for hidden, arguments in zip(batches, self._arguments, strict=True):
            output = layer(hidden, **arguments)
            outputs.append(output[0] if isinstance(output, tuple) else output)
        return outputs

    @contextmanager
    def _rounded_inputs(self, layer: nn.Module) -> Iterator[None]:
        """The layer as it will be served."""
        rounding = self._rounding
        if rounding is None:
            yield
            return
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
        hooks = [one.register_forward_pre_hook(lambda _, args: (rounding(args[0]),)) for one in linears]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@torch.no_grad()
def _input_of(layer: nn.Module, name: str, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
    """What the module ``name`` of ``layer`` is given for ``hidden``; nothing after it is computed."""
    seen: list[Tensor] = []

    def catch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])
        raise _Reached

    hook = layer.get_submodule(name).register_forward_pre_hook(catch, prepend=True)
    try:
        layer(hidden, **arguments)
    except _Reached:
        return seen[0]
    finally:
        hook.remove()
    raise AssertionError(f"a layer computes its {name}")
