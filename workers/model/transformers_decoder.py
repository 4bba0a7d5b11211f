"""A decoder whose layers transformers brings: any of its decoder-only models that take another attention.

Slower than native layers (nothing is fused, no CUDA graphs), with the same blocks, batches and sampling. Before the
first request the model is run once as transformers runs it and once over blocks: what the paged cache cannot express
(attention sinks, biases in masks, state besides keys and values) is refused and never computed wrongly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from workers.checkpoint.model_config import ModelConfig
from workers.checkpoint.quantization import Quantization
from workers.engine.errors import UserError
from workers.model.kv_pool import KVLayout
from workers.model.linear import LinearLayer
from workers.model.step_inputs import StepInputs
from workers.model.tensor_parallel import TensorParallelGroup, vocab_of
from workers.model.transformers_attention import (
    KEYWORD,
    NAME,
    Attention,
    PagedAttention,
    ShapeProbe,
    register,
)
from workers.model.transformers_rope import choose_once
from workers.model.transformers_shards import check_plan, take_over

_TRIAL_CHUNKS = (17, 6, 1)
"""Tokens of the steps that compute the trial prompt: two prompts' chunks over a block's border, and a decode."""
_TRIAL_BLOCK = 16
_TOLERANCES = {torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.1
_TOLERANCE_QUANTIZED = 0.7
"""Of the trial: norm of the difference to transformers' own logits, over theirs."""


def check_architecture(folder: Path, config: ModelConfig, tp_size: int) -> None:
    """Return if transformers has this model, takes another attention and can be shared so; reads no weights.

    Raises:
        UserError: it does not; the message says why.
    """
    hf_config = _read_config(folder)
    name = _model_class(hf_config).__name__
    check_plan(_plan(hf_config), config.num_kv_heads, tp_size, name)
    if config.quantization is not None:
        raise UserError(
            f"{folder} is quantized ({config.quantization.format}), which native layers alone read",
            "model_impl",
        )


class TransformersDecoder:
    """One rank's part of a decoder: what ``LlamaDecoder`` promises, by transformers' layers."""

    def __init__(
        self,
        config: ModelConfig,
        group: TensorParallelGroup,
        folder: Path,
        is_dummy: bool,
        quantization: Quantization | None,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        num_positions: int,
        progress: Callable[[float], None],
    ) -> None:
        """Load the model in ``folder``, cut it to this rank's share and try it.

        Raises:
            UserError: the architecture, its plan or its weights' format cannot be served.
        """
        self.config = config
        self.device = device
        # The head is not split.
        self.vocab = vocab_of(group, [range(config.vocab_size)] * group.size)
        self._dtype = dtype
        check_architecture(folder, config, group.size)
        hf_config = _read_config(folder)
        cls, plan = _model_class(hf_config), _plan(hf_config)
        register()
        # A rank alone has the whole model on its device anyway; others keep their part of it.
        place = device if group.size == 1 else torch.device("cpu")
        model = _load(cls, hf_config, folder, is_dummy, dtype, seed).eval().to(place)
        choose_once(model, num_positions)
        progress(0.5)
        trial = _trial_tokens(config.vocab_size)
        wanted = model(trial[None].to(place), use_cache=False).logits[0].float().to(device)
        self._linears = take_over(model.base_model, plan, group, quantization, device, dtype)
        self._model = model.to(device)
        self._model.set_attn_implementation(NAME)
        self._head = _with_body(self._model, _Given())
        probe = ShapeProbe()
        self._run_body(trial.to(device), torch.arange(len(trial), device=device), probe)
        self._kv_shape = _common_shape(probe, config, cls.__name__)
        size = self._kv_shape[1]
        self._unturned = torch.cat((torch.ones(size // 2), torch.zeros(size // 2)))[None].to(device)
        self._try(trial.to(device), wanted, cls.__name__, quantization is not None)
        progress(1.0)

    def kv_layout(self, block_size: int, dtype: torch.dtype) -> KVLayout:
        """Shape of this rank's KV cache in ``dtype``."""
        num_kv_heads, head_dim = self._kv_shape
        return KVLayout(self.config.num_layers, num_kv_heads, block_size, head_dim, dtype)

    def linears(self) -> list[LinearLayer]:
        """Projections within layers."""
        return self._linears

    def pack(self, is_narrow: bool = False) -> None:
        """Lay out the linear weights for this CPU; see ``LinearLayer.pack``."""
        for linear in self._linears:
            linear.pack(is_narrow)

    def attend_all(self, inputs: StepInputs, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Run all layers; return final hidden states, twice: nothing is left for ``hidden`` to do but to pick."""
        attention = PagedAttention(inputs, kv_cache, self._unturned)
        states = self._run_body(inputs.token_ids[: inputs.num_tokens], inputs.positions, attention)
        return states, states

    def hidden(self, attended: Tensor, residual: Tensor, tokens: Tensor) -> Tensor:
        """Final hidden states of some tokens of the step."""
        return attended[tokens]

    def logits(self, attended: Tensor, residual: Tensor, sample_tokens: Tensor) -> Tensor:
        """Return [num_samples, vocab] of some tokens, with whatever the model does to logits."""
        if sample_tokens.shape[0] == 0:
            return attended.new_empty(0, self.config.vocab_size)
        given = attended[sample_tokens][None]
        logits: Tensor = self._head(inputs_embeds=given, use_cache=False).logits[0]
        return logits

    def _run_body(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        outputs = self._model.base_model(
            input_ids=token_ids[None].long(),
            position_ids=positions[None],
            use_cache=False,
            **{KEYWORD: attention},
        )
        states: Tensor | None = getattr(outputs, "last_hidden_state", None)
        if states is None:
            raise UserError(
                f"{type(self._model).__name__} gives no hidden states apart from its logits: its layers cannot be "
                "run by Shoal",
                "model",
            )
        return states[0]

    def _try(self, token_ids: Tensor, wanted: Tensor, name: str, is_quantized: bool) -> None:
        """Compute a prompt in several steps over blocks; what comes out must be what transformers computes."""
        num_blocks = -(-len(token_ids) // _TRIAL_BLOCK)
        cache = self.kv_layout(_TRIAL_BLOCK, self._dtype).allocate(num_blocks, self.device)
        table = torch.arange(num_blocks - 1, -1, -1, device=self.device)
        found, start = [], 0
        for count in _TRIAL_CHUNKS:
            step = _one_row(token_ids[start : start + count], start, table)
            attended, residual = self.attend_all(step, cache)
            found.append(self.logits(attended, residual, torch.arange(count, device=self.device)))
            start += count
        difference = torch.cat(found).float() - wanted
        limit = _TOLERANCE_QUANTIZED if is_quantized else _TOLERANCES.get(self._dtype, _TOLERANCE_16_BIT)
        error = float(difference.norm() / wanted.norm())
        if not error <= limit:
            raise UserError(
                f"{name} over paged blocks differs by {error:.1%} from transformers' own: it attends in a way, or "
                "keeps a state, that Shoal does not have",
                "model",
            )


class _Given(nn.Module):
    """In the place of a model's layers: hands out the hidden states that it is given as embeddings."""

    @property
    def decoder(self) -> _Given:
        """Some heads ask the layers' owner for its only part."""
        return self

    def forward(self, *args: object, inputs_embeds: Tensor, **others: object) -> _States:
        return _States(inputs_embeds)


class _States:
    """A body's output that has states and nothing else, under whatever name."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state


def _with_body(model: Any, body: nn.Module) -> Any:
    """The same model, weights shared, with other layers; what it does to their output is its own."""
    shallow = copy.copy(model)
    shallow._modules = dict(model._modules)
    setattr(shallow, model.base_model_prefix, body)
    return shallow


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise UserError(f"transformers cannot read {folder}/config.json: {error}", "model") from error


def _model_class(hf_config: Any) -> Any:
    import transformers

    names = hf_config.architectures or [""]
    cls = getattr(transformers, names[0], None)
    if cls is None:
        raise UserError(f"neither Shoal nor transformers {transformers.__version__} has {names[0]}", "model")
    if not getattr(cls, "_supports_attention_backend", False):
        raise UserError(
            f"transformers' {names[0]} takes no attention but its own, so that Shoal cannot run it", "model"
        )
    return cls


def _plan(hf_config: Any) -> Mapping[str, str] | None:
    plan: Mapping[str, str] | None = getattr(hf_config, "base_model_tp_plan", None)
    return plan


def _load(cls: Any, hf_config: Any, folder: Path, is_dummy: bool, dtype: torch.dtype, seed: int) -> Any:
    from transformers.utils import logging as transformers_logging

    if is_dummy:
        torch.manual_seed(seed)
        return cls._from_config(hf_config, dtype=dtype, attn_implementation="eager")
    transformers_logging.disable_progress_bar()
    try:
        model, report = cls.from_pretrained(
            folder,
            config=hf_config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise UserError(
            f"a .safetensors file of {folder} is damaged or cut off ({error}): fetch it again", "model"
        ) from error
    except OSError as error:
        raise UserError(
            f"{folder} holds no .safetensors weights that transformers reads: {error}", "model"
        ) from error
    # transformers draws at random what it does not find, or not in the shape of the config.
    if report["missing_keys"]:
        raise UserError(f"{folder} has no tensor {min(report['missing_keys'])}", "model")
    if report["mismatched_keys"]:
        name, *shapes = min(report["mismatched_keys"])
        found, wanted = (list(shape) for shape in shapes)
        raise UserError(f"tensor {name} of {folder} has shape {found}, its config says {wanted}", "model")
    return model


def _common_shape(probe: ShapeProbe, config: ModelConfig, name: str) -> tuple[int, int]:
    shapes = set(probe.shapes.values())
    if sorted(probe.shapes) != list(range(config.num_layers)) or len(shapes) != 1:
        raise UserError(
            f"{name} has {config.num_layers} layers, of which {len(probe.shapes)} attend, with {len(shapes)} shapes of "
            "keys: Shoal's blocks hold keys and values of one shape for all layers",
            "model",
        )
    return shapes.pop()


def _trial_tokens(vocab_size: int) -> Tensor:
    """Any tokens, the same on all ranks."""
    return (torch.arange(sum(_TRIAL_CHUNKS)) * 7919 + 11) % vocab_size


def _one_row(token_ids: Tensor, start: int, table: Tensor) -> StepInputs:
    """A step of one row's next tokens."""
    device, count = token_ids.device, len(token_ids)
    is_decode = count == 1
    positions = torch.arange(start, start + count, device=device)
    lens = torch.tensor([start + count], dtype=torch.int32, device=device)
    tables = table[None].to(torch.int32)
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slots=table[positions // _TRIAL_BLOCK] * _TRIAL_BLOCK + positions % _TRIAL_BLOCK,
        num_decodes=int(is_decode),
        decode_block_tables=tables if is_decode else tables[:0],
        decode_context_lens=lens if is_decode else lens[:0],
        max_decode_context_len=start + count if is_decode else 0,
        prefill_block_tables=tables[:0] if is_decode else tables,
        prefill_query_starts=torch.tensor([0] if is_decode else [0, count], dtype=torch.int32, device=device),
        prefill_context_lens=lens[:0] if is_decode else lens,
        sample_tokens=positions[:0],
    )
