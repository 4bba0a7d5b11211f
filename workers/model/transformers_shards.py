"""A transformers model cut to one rank's share by the plan that the model gives, its linear layers made ours.

Plans name linear layers and how each is split ("colwise": by outputs, "rowwise": by inputs, with a sum over ranks).
Shares are equal, so that heads stay whole without the plan saying which outputs are heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from workers.checkpoint.quantization import Quantization
from workers.engine.errors import UserError
from workers.model.linear import LinearLayer
from workers.model.quantized.linears import make_linear
from workers.model.quantized.readers import quantize_online
from workers.model.quantized.stored_weight import DenseWeight, StoredWeight
from workers.model.tensor_parallel import TensorParallelGroup

_BY_OUTPUTS = ("colwise", "colwise_gather_output", "packed_colwise")
_BY_INPUTS = ("rowwise", "rowwise_split_input")
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "embedding_rowwise")
"""Layers that stay as they are on every rank."""

Change = Callable[[Tensor], Tensor]


class LinearModule(nn.Module):
    """One of our linear layers in the place of one of transformers'."""

    def __init__(self, linear: LinearLayer, before: Change, after: Change, dtype: torch.dtype) -> None:
        """Multiply what ``before`` makes of inputs; ``after`` makes outputs of the product. Both take rows."""
        super().__init__()
        self.linear = linear
        self._before, self._after = before, after
        self.weight = torch.empty(0, dtype=dtype)
        """Layers look up its dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for ``x`` [..., in]."""
        rows = self._before(x.reshape(-1, x.shape[-1])).contiguous()
        return self._after(self.linear(rows)).view(*x.shape[:-1], -1)


def check_plan(plan: Mapping[str, str] | None, num_kv_heads: int, tp_size: int, name: str) -> None:
    """Return if a model with this plan can be shared by so many ranks.

    Raises:
        UserError: it has no plan, or one with a split that Shoal does not do, or heads do not come out even.
    """
    if tp_size == 1:
        return
    if not plan:
        raise UserError(f"transformers has no tensor-parallel plan for {name}", "tensor_parallel_size")
    unknown = sorted(set(plan.values()).difference(_BY_OUTPUTS, _BY_INPUTS, _WHOLE))
    if unknown:
        raise UserError(
            f"{name} is split by {', '.join(unknown)}, which Shoal does not do", "tensor_parallel_size"
        )
    if num_kv_heads % tp_size:
        raise UserError(
            f"--tensor-parallel-size is {tp_size}, so many ranks cannot share {num_kv_heads} KV heads of {name} "
            f"evenly: take a number that divides {num_kv_heads}",
            "tensor_parallel_size",
        )


def take_over(
    body: nn.Module,
    plan: Mapping[str, str] | None,
    group: TensorParallelGroup,
    quantization: Quantization | None,
    device: torch.device,
    dtype: torch.dtype,
) -> list[LinearLayer]:
    """Replace the linear layers of ``body`` in place; return the new ones.

    Raises:
        UserError: a layer does not come out even.
    """
    made: list[LinearLayer] = []
    for name, module in list(body.named_modules()):
        found = _weight_of(module)
        if found is None:
            continue
        weight, bias = found
        before: Change = _same
        after: Change = _same
        style = _style(plan, name) if group.size > 1 else ""
        if style in _BY_OUTPUTS:
            rows = _share(weight.shape[0], group, name, parts=2 if style == "packed_colwise" else 1)
            weight, bias = weight[rows], None if bias is None else bias[rows]
            if style == "colwise_gather_output":
                after = _Gather(group)
        elif style in _BY_INPUTS:
            columns = _share(weight.shape[1], group, name)
            weight = weight[:, columns]
            bias = bias if group.rank == 0 else None
            after = group.all_reduce
            if style == "rowwise_split_input":
                before = _Columns(columns)
        stored: StoredWeight = DenseWeight(weight.to(device))
        if quantization is not None:
            stored = quantize_online(weight.to(device), quantization)
        bias = None if bias is None else bias.to(device, dtype).contiguous()
        linear = make_linear([stored], bias, device, dtype)
        made.append(linear)
        parent, _, last = name.rpartition(".")
        setattr(body.get_submodule(parent), last, LinearModule(linear, before, after, dtype))
    return made


class _Gather:
    """All ranks' outputs side by side."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.gather(x.contiguous()).transpose(0, 1).reshape(x.shape[0], -1)


class _Columns:
    """This rank's part of inputs that all ranks have."""

    def __init__(self, columns: Tensor) -> None:
        self._first, self._count = int(columns[0]), len(columns)

    def __call__(self, x: Tensor) -> Tensor:
        return x.narrow(-1, self._first, self._count)


def _same(x: Tensor) -> Tensor:
    return x


def _weight_of(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """[out, in] and [out]; GPT-2's ``Conv1D`` is a linear layer written the other way round."""
    from transformers.pytorch_utils import Conv1D

    if type(module) is nn.Linear:
        return module.weight.data, None if module.bias is None else module.bias.data
    if type(module) is Conv1D:
        return module.weight.data.t(), module.bias.data
    return None


def _style(plan: Mapping[str, str] | None, name: str) -> str:
    """By the plan's names, in which ``*`` is a layer's number."""
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
    return (plan or {}).get(pattern, "")


def _share(total: int, group: TensorParallelGroup, name: str, parts: int = 1) -> Tensor:
    """This rank's share of each of ``parts`` equal parts of ``total`` rows or columns."""
    size, rest = divmod(total, parts * group.size)
    if rest:
        raise UserError(
            f"--tensor-parallel-size is {group.size}, so many ranks cannot share {total} of {name} evenly: take fewer",
            "tensor_parallel_size",
        )
    starts = torch.arange(parts) * (total // parts) + group.rank * size
    return (starts[:, None] + torch.arange(size)).flatten()
