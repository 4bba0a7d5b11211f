"""What stands after a layer's attention: a gated MLP, or experts of which each token is given to a few."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.experts import Routing, route
from kernels.scaled_rows import RowFormat
from kernels.silu_mul import gelu_mul, silu_mul
from workers.checkpoint.model_config import Experts
from workers.model.linear import Activations, LinearLayer, gated_for
from workers.model.quantized.expert_weights import ExpertWeights


class Mlp(Protocol):
    """Activations in, this rank's part of the output out."""

    def row_format(self, num_tokens: int) -> RowFormat | None:
        """See ``LinearLayer``."""
        ...

    def __call__(self, x: Activations) -> Tensor:
        """Return [num_tokens, hidden]."""
        ...

    def linears(self) -> list[LinearLayer]:
        """The projections that can be packed and timed one by one."""
        ...


class DenseMlp:
    """SwiGLU or GeGLU."""

    def __init__(self, gate_up: LinearLayer, down: LinearLayer, activation: str = "silu") -> None:
        """Take the two projections; ``activation`` is "silu" or "gelu_tanh"."""
        self.gate_up = gate_up
        self.down = down
        self.is_silu = activation == "silu"

    def row_format(self, num_tokens: int) -> RowFormat | None:
        """See ``LinearLayer``."""
        return self.gate_up.row_format(num_tokens)

    def __call__(self, x: Activations) -> Tensor:
        """See ``Mlp``."""
        gate_up = self.gate_up(x)
        return self.down(gated_for(self.down, gate_up) if self.is_silu else gelu_mul(gate_up))

    def linears(self) -> list[LinearLayer]:
        """See ``Mlp``."""
        return [self.gate_up, self.down]


class ExpertMlp:
    """Experts whose weights lie in one tensor: one launch for all of them."""

    def __init__(
        self, shape: Experts, router: LinearLayer, gate_up: ExpertWeights, down: ExpertWeights
    ) -> None:
        """Take the experts' two projections."""
        self._shape = shape
        self._router = router
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Activations) -> Tensor:
        """See ``Mlp``."""
        assert isinstance(x, Tensor), "experts take plain activations"
        routing = route(self._router(x), self._shape.top_k, self._shape.has_normed_weights)
        gated = silu_mul(self._gate_up(x.contiguous(), routing, is_spread=False))
        spread = self._down(gated, routing, is_spread=True)
        return spread.view(x.shape[0], routing.top_k, -1).sum(1)

    def row_format(self, num_tokens: int) -> RowFormat | None:
        """See ``LinearLayer``."""
        return None

    def linears(self) -> list[LinearLayer]:
        """See ``Mlp``."""
        return [self._router]


class SeparateExpertMlp:
    """Experts that are layers of their own, one after the other: on a CPU, where nothing is launched."""

    def __init__(self, shape: Experts, router: LinearLayer, experts: list[DenseMlp]) -> None:
        """Take the experts in order."""
        self._shape = shape
        self._router = router
        self._experts = experts

    def __call__(self, x: Activations) -> Tensor:
        """See ``Mlp``."""
        assert isinstance(x, Tensor), "experts take plain activations"
        routing = route(self._router(x), self._shape.top_k, self._shape.has_normed_weights)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert, pairs in self._chosen(routing):
            tokens = pairs // routing.top_k
            scaled = expert(x[tokens]).float() * routing.weights.flatten()[pairs, None]
            out.index_add_(0, tokens, scaled)
        return out.to(x.dtype)

    def row_format(self, num_tokens: int) -> RowFormat | None:
        """See ``LinearLayer``."""
        return None

    def linears(self) -> list[LinearLayer]:
        """See ``Mlp``."""
        return [self._router, *(linear for expert in self._experts for linear in expert.linears())]

    def _chosen(self, routing: Routing) -> list[tuple[DenseMlp, Tensor]]:
        """The experts that have tokens, each with its pairs."""
        starts = routing.starts.tolist()
        bounds = zip(self._experts, starts, starts[1:], strict=False)
        return [(expert, routing.pairs[start:end]) for expert, start, end in bounds if end > start]
