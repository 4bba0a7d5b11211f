"""``LLM``: generation over lists of prompts, without Ray. Argument names are those of vLLM's ``LLM``.

With one rank, brain and rank run in this process; with more, each rank is a process of its own and plans
reach them over the step channel, as in a cluster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from tqdm import tqdm

from deploy.model_check import check_model
from deploy.offline.beam_search import BeamSearchParams, SearchedChoice
from deploy.offline.choice import Choice
from deploy.offline.engine_config import engine_config
from deploy.offline.executor import start_executor
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
from deploy.offline.prompts import Prompt, as_list, load_tokenizer, params_for
from deploy.offline.request_writer import RequestWriter
from deploy.offline.sampling_params import SamplingParams
from deploy.settings import make_settings
from router.text.chat_template import TemplateOptions
from router.text.tokenizer import Tokenizer
from workers.calibration import measure_copies
from workers.checkpoint.model_config import read_model_config
from workers.checkpoint.source import resolve_model
from workers.engine.admission import context_len
from workers.engine.cost_model import CostModel
from workers.engine.engine import Engine
from workers.engine.errors import InvalidRequest, PromptTooLong, ShoalError
from workers.engine.outputs import Load, TokenOutput
from workers.engine.request import ChoiceParams, EngineRequest

_log = logging.getLogger("shoal.offline")
_MOST_PRIORITY = 2**31 - 1


class LLM:
    """One model, ready to generate."""

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
        for note in settings.notes:
            _log.info(note)
        files = resolve_model(settings.model, settings.source)
        model_config = read_model_config(files, settings.model_impl)
        check_model(settings, files, model_config)
        self.tokenizer = None if skip_tokenizer_init else load_tokenizer(settings, files)
        self._executor, counts = start_executor(settings, files)
        self.max_model_len = context_len(
            settings.max_model_len, model_config.max_position_embeddings, counts.device, settings.block_size
        )
        self.engine_config = engine_config(settings, self.max_model_len, counts, model_config)
        self.num_blocks, self.num_host_blocks = counts.device, counts.host
        self.block_bytes = counts.block_bytes
        self._cost = measure_copies(self._executor, self.engine_config, CostModel())
        self._engine = Engine(self.engine_config, self._cost)
        self.vocab_size = model_config.vocab_size
        self._writer = RequestWriter(
            self.tokenizer, self.max_model_len, self.vocab_size, model_config.eos_token_ids, settings.seed
        )
        self._choices: dict[str, Choice | PooledChoice | SearchedChoice] = {}

    # -- generating ---------------------------------------------------------------------------------------

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
            ShoalError: the model's weights are broken, or a rank is lost.
        """
        listed = as_list(prompts)
        params = params_for(sampling_params, len(listed))
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
        outputs = [self._writer.prepare(prompt, one) for prompt, one in zip(listed, params, strict=True)]
        try:
            for output, one, rank in zip(outputs, params, priorities, strict=True):
                self._submit(output, one, rank)
            self._run(outputs, use_tqdm)
        except BaseException:
            self._withdraw()
            raise
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
        """
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
        prompts = [
            {"prompt_token_ids": self.tokenizer.encode_chat(list(one), options)} for one in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self, prompts: Prompt | Iterable[Prompt], params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt that a beam search finds, best first.

        Raises:
            UserError: a prompt cannot be served; nothing was generated.
        """
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
        params = pooled_params(pooling)
        choices = [
            PooledChoice(self._writer.prepare(prompt, SamplingParams())) for prompt in as_list(prompts)
        ]
        self._complete(choices, params, use_tqdm)
        return choices

    def _complete(
        self, choices: Sequence[PooledChoice | SearchedChoice], params: ChoiceParams, use_tqdm: bool
    ) -> None:
        """Run requests that end with the one output they have."""
        try:
            for choice in choices:
                request = choice.request
                self._choices[request.request_id] = choice
                self._engine.add(
                    EngineRequest(request.request_id, request.prompt_token_ids, params), time.monotonic()
                )
            self._run([choice.request for choice in choices], use_tqdm)
        except BaseException:
            self._withdraw()
            raise

    @property
    def load(self) -> Load:
        """What the engine holds, and its counts since start."""
        return self._engine.load()

    @property
    def step_error_p50(self) -> float:
        """Median error of what the cost model has predicted for the last steps, relative to what they took."""
        return self._engine.step_error_p50

    def restart_engine(self, **fields: Any) -> None:
        """Begin anew with an empty engine on the same ranks.

        Args:
            fields: of ``EngineConfig``, where they differ from how the model was loaded; no limit may be higher.
        """
        assert not self._choices, "the engine is restarted between two runs"
        self._turn_until_idle()
        self._engine = Engine(replace(self.engine_config, **fields), self._cost)

    def close(self) -> None:
        """Let the ranks go."""
        self._executor.close()

    # -- the loop -----------------------------------------------------------------------------------------

    def _run(self, outputs: Sequence[RequestOutput], use_tqdm: bool) -> None:
        engine, executor = self._engine, self._executor
        started_s, num_before = time.monotonic(), engine.num_output_tokens
        with tqdm(total=len(outputs), desc="Prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while self._choices:
                while (plan := engine.plan(time.monotonic())) is not None:
                    executor.launch(plan)
                if engine.num_launched:
                    for token_output in engine.apply(executor.collect(), time.monotonic()):
                        if self._take(token_output.request_id, token_output) and use_tqdm:
                            num_tokens = engine.num_output_tokens - num_before
                            rate = num_tokens / (time.monotonic() - started_s)
                            bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                            bar.update(1)
        # Copies to the host tier may go on: nobody waits for them.
        self._collect_launched()

    def _turn_until_idle(self) -> None:
        """Wait for what is under way though no request is: copies between the tiers."""
        while self._engine.has_work:
            while (plan := self._engine.plan(time.monotonic())) is not None:
                self._executor.launch(plan)
            self._collect_launched()

    def _collect_launched(self) -> None:
        while self._engine.num_launched:
            self._engine.apply(self._executor.collect(), time.monotonic())

    def _submit(self, output: RequestOutput, params: SamplingParams, priority: int) -> None:
        for written in self._writer.write(output, params, priority):
            self._choices[written.request.request_id] = written.choice
            # A request without earlier output cannot have ended yet, so nothing comes back.
            self._engine.add(written.request, time.monotonic(), written.matcher)

    def _take(self, request_id: str, token_output: TokenOutput) -> bool:
        """Hand an output to its choice; True if its prompt has all of its outputs now."""
        if token_output.error is not None and not token_output.is_user_error:
            raise ShoalError(token_output.error)
        choice = self._choices[request_id]
        ended = choice.take(token_output)
        if not ended:
            return False
        if token_output.finish_reason is None:  # a stop string was found: the engine does not know
            self._engine.abort(request_id)
        del self._choices[request_id]
        return choice.request.finished

    def _withdraw(self) -> None:
        """Leave the engine empty after a refused prompt or an interrupted run."""
        for request_id in list(self._choices):
            self._engine.abort(request_id)
        self._choices.clear()
        self._collect_launched()
