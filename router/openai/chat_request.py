"""From a chat's body to its generation: checked against the model, tokenized, with a parser for each choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

from router.generation import Generation
from router.ingress import Ingress
from router.journal import Prompt
from router.openai.beams import width_param
from router.openai.chat_message import GrowingMessage
from router.openai.messages import conversation, template_options
from router.openai.sampling import (
    check_num_logprobs,
    check_sampling,
    choice_params,
    prompt_terms,
    resolve_max_tokens,
    text_params,
)
from router.openai.schema import ChatBody
from router.openai.structured import wanted_grammar
from router.openai.tools import ToolUse, tool_use
from router.served_model import ServedModel
from router.text.grammars import WantedGrammar, json_schema_grammar
from router.text.message import MessageParser
from router.text.reasoning import ReasoningParser, ReasoningSyntax
from router.text.tools.call_parser import CallParser
from workers.engine.errors import InvalidRequest
from workers.engine.request import ChoiceParams


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat that has not begun to run."""

    model: ServedModel
    generation: Generation
    num_logprobs: int | None
    messages: list[GrowingMessage] | None
    """Of each choice, where calls or thinking must be told apart; None: text is text."""
    is_named: bool
    """One function was named to be called."""


async def prepare_chat(ingress: Ingress, body: ChatBody, completion_id: str, request_id: str) -> PreparedChat:
    """Check a body against its model and tokenize it; nothing runs yet.

    Raises:
        UserError: the body asks for what this model cannot give.
    """
    model = ingress.model(body.model)
    check_sampling(body, 1, model.tokenizer.vocab_size, ingress.limits)
    num_logprobs = _num_logprobs(body)
    check_num_logprobs(num_logprobs or 0, "top_logprobs", ingress.limits)
    answer = wanted_grammar(body)
    use = tool_use(
        body, model.tool_format, model.tokenizer, answer, allows_auto=model.config.enable_auto_tool_choice
    )
    grammar = answer if use is None or use.grammar is None else use.grammar
    try:
        await model.check_grammar(grammar)
    except InvalidRequest:
        await _check_each_tool(model, grammar, use)
        raise
    asked, param = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        asked, param = body.max_completion_tokens, "max_completion_tokens"
    terms = prompt_terms(body, model.max_model_len, asked)
    options = template_options(body, use.tools if use is not None else ())
    chat = conversation(body.messages, model.tokenizer.chat_template, options)
    prompt = await model.prompt_of_chat(chat, terms)
    max_tokens = resolve_max_tokens(asked, param, len(prompt), model.max_model_len)
    params = choice_params(body, max_tokens, num_logprobs, ingress.draw_seed(), model.tokenizer, grammar)
    thinking = _Thinking.of(model, prompt)
    params = [thinking.limit(one, body.thinking_token_budget) for one in params]
    text = text_params(body)
    if use is not None and use.format.shows_special_tokens:
        text = replace(text, skip_special_tokens=False)
    generation = ingress.generation(model, completion_id, [prompt], params, text)
    generation.width_param = width_param(body)
    if grammar is not None:
        generation.grammar_param = grammar.param
    messages = _messages(request_id, len(params), use, thinking)
    return PreparedChat(model, generation, num_logprobs, messages, use is not None and use.is_named)


async def _check_each_tool(model: ServedModel, grammar: WantedGrammar | None, use: ToolUse | None) -> None:
    """Name the function whose parameters cannot be enforced, if a grammar of several cannot for one of them."""
    if use is not None and grammar is not None and grammar is use.grammar:
        for tool in use.tools:
            await model.check_grammar(WantedGrammar(json_schema_grammar(tool.schema), tool.param))


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs: only allowed with logprobs=true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


@dataclass(frozen=True, slots=True)
class _Thinking:
    """How a model's thinking is told apart, and whether the prompt has begun or ended it."""

    syntax: ReasoningSyntax | None
    is_open: bool | None
    end_ids: tuple[int, ...]

    @classmethod
    def of(cls, model: ServedModel, prompt: Prompt) -> _Thinking:
        """As the model is configured and the prompt has it."""
        syntax, tokenizer = model.reasoning, model.tokenizer
        if syntax is None:
            return cls(None, None, ())
        if tokenizer.ends_with(prompt.token_ids, syntax.end):
            return cls(syntax, False, ())
        is_open = True if tokenizer.ends_with(prompt.token_ids, syntax.begin) else None
        return cls(syntax, is_open, tuple(tokenizer.encode(syntax.end, add_special_tokens=False)))

    def limit(self, params: ChoiceParams, budget: int | None) -> ChoiceParams:
        """Let a grammar wait for the answer, and thinking end within its budget."""
        if budget is not None and self.syntax is None:
            raise InvalidRequest(
                "thinking_token_budget: this model's thinking is not told apart (--reasoning-parser)",
                "thinking_token_budget",
            )
        if not self.end_ids or (budget is None and not params.grammar):
            return params
        return replace(params, thinking_end=self.end_ids, thinking_budget=budget)


def _messages(
    request_id: str, num_choices: int, use: ToolUse | None, thinking: _Thinking
) -> list[GrowingMessage] | None:
    """A parser for each choice; None where text is text."""
    if use is None and thinking.syntax is None:
        return None
    messages = []
    for index in range(num_choices):
        reasoning = (
            ReasoningParser(thinking.syntax, is_thinking=thinking.is_open) if thinking.syntax else None
        )
        is_demanded = use is not None and use.is_demanded
        calls = CallParser(use.format.syntax, use.names, is_demanded=is_demanded) if use is not None else None
        length = use.format.id_chars if use is not None else 0
        new_id = partial(_call_id, f"{request_id}-{index}", length)
        messages.append(GrowingMessage(MessageParser(reasoning, calls), new_id, is_demanded=is_demanded))
    return messages


def _call_id(request_id: str, length: int, number: int) -> str:
    """Mistral's templates want exactly nine characters."""
    digest = blake2b(f"{request_id}-{number}".encode(), digest_size=16).hexdigest()
    return digest[:length] if length == 9 else f"call_{digest[:length]}"
