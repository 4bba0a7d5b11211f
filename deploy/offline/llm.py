"""``LLM``: generation over lists of prompts, without Ray. Argument names are those of vLLM's ``LLM``.

With one rank, brain and rank run in this process; with more, each rank is a process of its own and plans
reach them over the step channel, as in a cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

from deploy.model_check import check_model
from deploy.offline.beam_search import BeamSearchParams, SearchedChoice
from deploy.offline.engine_config import engine_config
from deploy.offline.engine_loop import EngineLoop
from deploy.offline.executor import start_executor
from deploy.offline.failures import naming_prompt, raise_failures
from deploy.offline.llm_settings import LLMSettings
from deploy.offline.outputs import (
    BeamSearchOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
)
from deploy.offline.pooling import PooledChoice, pooled_params, unit
from deploy.offline.prompts import Prompt, as_list, conversation, load_tokenizer, params_for
from deploy.offline.request_writer import RequestWriter
from deploy.offline.sampling_params import SamplingParams
from deploy.offline.spawning import refuse_in_import
from deploy.settings import make_settings
from router.text.chat_template import TemplateOptions
from router.text.tokenizer import Tokenizer
from workers.calibration import measure_copies
from workers.checkpoint.model_config import read_model_config
from workers.checkpoint.source import resolve_model
from workers.engine.admission import context_len
from workers.engine.cost_model import CostModel
from workers.engine.errors import InvalidRequest, PromptTooLong
from workers.engine.outputs import Load
from workers.engine.request import ChoiceParams, EngineRequest

_log = logging.getLogger("shoal.offline")
_MOST_PRIORITY = 2**31 - 1


class LLM:
    """One model, ready to generate. Threads take turns: a call waits until those of others have ended."""

    max_model_len: int
    """Most tokens of a prompt and its output."""
    vocab_size: int

    def __init__(
        self,
        model: str | None = None,
        *,
        skip_tokenizer_init: bool = False,
        **given: Unpack[LLMSettings],
    ) -> None:
        """Load the model.

        Args:
            model: a folder, a .gguf file, a hub id, or None for the demo model.
            skip_tokenizer_init: leave the tokenizer out; prompts are then token ids and outputs have no text.
            given: settings by the names of ``shoal serve``'s flags, which explains them (``--help``).

        Raises:
            UserError: the model is unknown or a setting does not fit it; no rank has been started.
            ShoalError: a rank could not start.
        """
        if unknown := given.keys() - LLMSettings.__annotations__.keys():
            raise TypeError(f"LLM() got an unexpected keyword argument {min(unknown)!r}")
        settings = make_settings(model=model, replicas=1, **given)
        if settings.tensor_parallel_size > 1:
            refuse_in_import(
                settings.tensor_parallel_size
            )  # a rank would load all that comes before its start
        for note in settings.notes:
            _log.info(note)
        files = resolve_model(settings.model, settings.source)
        model_config = read_model_config(files, settings.model_impl)
        check_model(settings, files, model_config)
        self.tokenizer = None if skip_tokenizer_init else load_tokenizer(settings, files)
        executor, counts = start_executor(settings, files)
        self.max_model_len = context_len(
            settings.max_model_len, model_config.max_position_embeddings, counts.device, settings.block_size
        )
        self.engine_config = engine_config(settings, self.max_model_len, counts, model_config)
        self.num_blocks, self.num_host_blocks = counts.device, counts.host
        self.block_bytes = counts.block_bytes
        cost = measure_copies(executor, self.engine_config, CostModel())
        self._loop = EngineLoop(self.engine_config, executor, cost)
        self.vocab_size = model_config.vocab_size
        self._writer = RequestWriter(
            self.tokenizer, self.max_model_len, self.vocab_size, model_config.eos_token_ids, settings.seed
        )

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt; outputs come in the order of the prompts.

        Args:
            prompts: text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; one, or several.
            sampling_params: one for all, or one for each prompt.
            priority: of each prompt with ``scheduling_policy="priority"``; lower is served first.

        Raises:
            UserError: a prompt cannot be served; nothing was generated.
            PromptsFailed: prompts failed while their output was made; the error has what the others gave.
            ShoalError: the model's weights are broken, or a rank is lost.
        """
        self._loop.check_open()
        listed = as_list(prompts)
        params = params_for(sampling_params, len(listed))
        if priority is not None and not isinstance(priority, Iterable):
            raise InvalidRequest(
                f"priority is {priority!r}, it must be a list: one for each prompt", "priority"
            )
        priorities = [0] * len(listed) if priority is None else list(priority)
        if len(priorities) != len(listed):
            raise InvalidRequest(
                f"{len(priorities)} priorities for {len(listed)} prompts: give one for each", "priority"
            )
        for one_priority in priorities:
            if type(one_priority) is not int or abs(one_priority) > _MOST_PRIORITY:
                raise InvalidRequest(
                    f"a priority is {one_priority!r}, it must be an integer from {-_MOST_PRIORITY} to {_MOST_PRIORITY}",
                    "priority",
                )
        outputs = []
        for index, (prompt, one) in enumerate(zip(listed, params, strict=True)):
            with naming_prompt(index, len(listed)):
                outputs.append(self._writer.prepare(prompt, one))
        with self._loop.turn():
            for index, (output, one, rank) in enumerate(zip(outputs, params, priorities, strict=True)):
                with naming_prompt(index, len(listed)):
                    for written in self._writer.write(output, one, rank):
                        self._loop.add(written.request, written.choice, written.matcher)
            self._loop.run(len(outputs), use_tqdm)
        raise_failures(outputs)
        for output, one in zip(outputs, params, strict=True):
            if one.is_contest:
                output.keep_best(one.n)
        return outputs

    def chat(
        self,
        messages: Iterable[Mapping[str, Any]] | Iterable[Iterable[Mapping[str, Any]]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of each conversation, by the model's chat template.

        Args:
            messages: one conversation, or a list of them.
            sampling_params: one for all, or one for each conversation.
            tools: functions that the template shows; the output is text as the model writes it.
            chat_template_kwargs: variables of the template's own.

        Raises:
            UserError: a conversation is none that ``/v1/chat/completions`` would take, or cannot be served;
                nothing was generated.
        """
        if not isinstance(messages, Iterable):
            raise InvalidRequest(f"messages are {messages!r}, they must be a list of messages", "messages")
        if tools is not None and not isinstance(tools, Sequence):
            raise InvalidRequest(f"tools are {tools!r}, they must be a list of functions", "tools")
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            raise InvalidRequest(
                f"chat_template_kwargs are {chat_template_kwargs!r}, they must be a dict",
                "chat_template_kwargs",
            )
        if self.tokenizer is None:
            raise InvalidRequest("chat needs the tokenizer: leave out skip_tokenizer_init", "messages")
        given: list[Any] = list(messages)
        conversations = [given] if given and isinstance(given[0], Mapping) else given
        options = TemplateOptions(
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            tools=list(tools or ()),
            kwargs=dict(chat_template_kwargs or {}),
        )
        prompts = []
        for index, one in enumerate(conversations):
            with naming_prompt(index, len(conversations)):
                told = conversation(one, self.tokenizer.chat_template)
                prompts.append({"prompt_token_ids": self.tokenizer.encode_chat(told, options)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt that a beam search finds, best first.

        Raises:
            UserError: a prompt cannot be served; nothing was generated.
        """
        self._loop.check_open()
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(
                f"params are of type {type(params).__name__}, they must be BeamSearchParams", "params"
            )
        prepared = [self._writer.prepare(prompt, SamplingParams()) for prompt in as_list(prompts)]
        longest = max(len(one.prompt_token_ids) for one in prepared) if prepared else 0
        if longest + params.max_tokens > self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {longest} tokens and max_tokens is {params.max_tokens}, this model takes "
                f"{self.max_model_len}: lower max_tokens or shorten the prompt",
                "max_tokens",
            )

        choices = [SearchedChoice(one) for one in prepared]
        self._complete(choices, params.choice, use_tqdm)
        if self.tokenizer is not None:
            for sequence in (sequence for choice in choices for sequence in choice.sequences):
                sequence.text = self.tokenizer.decode(sequence.tokens)
        return [BeamSearchOutput(choice.sequences) for choice in choices]

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            InvalidRequest: it was left out.
        """
        if self.tokenizer is None:
            raise InvalidRequest("the tokenizer was left out: leave out skip_tokenizer_init", "tokenizer")
        return self.tokenizer

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling: str = "mean",
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector of length 1 for each prompt: its last hidden states, their mean or the last one.

        Raises:
            UserError: a prompt cannot be served; nothing was computed.
        """
        return [
            EmbeddingRequestOutput(
                one.request.request_id, EmbeddingOutput(unit(one.vector)), one.request.prompt_token_ids
            )
            for one in self._pool(prompts, pooling, use_tqdm)
        ]

    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling: str = "mean",
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """As ``embed``, with the vectors as the model gives them, as tensors."""
        import torch

        return [
            PoolingRequestOutput(
                one.request.request_id, PoolingOutput(torch.tensor(one.vector)), one.request.prompt_token_ids
            )
            for one in self._pool(prompts, pooling, use_tqdm)
        ]

    def _pool(self, prompts: Prompt | Iterable[Prompt], pooling: str, use_tqdm: bool) -> list[PooledChoice]:
        self._loop.check_open()
        params, listed = pooled_params(pooling), as_list(prompts)
        choices = []
        for index, prompt in enumerate(listed):
            with naming_prompt(index, len(listed)):
                choices.append(PooledChoice(self._writer.prepare(prompt, has_output=False)))
        self._complete(choices, params, use_tqdm)
        return choices

    def _complete(
        self, choices: Sequence[PooledChoice | SearchedChoice], params: ChoiceParams, use_tqdm: bool
    ) -> None:
        """Run requests that end with the one output they have."""
        with self._loop.turn():
            for index, choice in enumerate(choices):
                request = choice.request
                with naming_prompt(index, len(choices)):
                    self._loop.add(
                        EngineRequest(request.request_id, request.prompt_token_ids, params), choice
                    )
            self._loop.run(len(choices), use_tqdm)

    @property
    def load(self) -> Load:
        """What the engine holds, and its counts since start."""
        return self._loop.load

    @property
    def step_error_p50(self) -> float:
        """Median error of what the cost model has predicted for the last steps, relative to what they took."""
        return self._loop.engine.step_error_p50

    def restart_engine(self, **fields: Any) -> None:
        """Begin anew with an empty engine on the same ranks.

        Args:
            fields: of ``EngineConfig``, where they differ from how the model was loaded; no limit may be higher.
        """
        self._loop.restart(**fields)

    def close(self) -> None:
        """Let the ranks go; nothing can be generated afterwards. Safe to call twice."""
        self._loop.close()
        self._writer.close()
