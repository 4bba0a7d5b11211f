"""One model of an ingress: its text side, and the replicas that run it."""

from __future__ import annotations

import asyncio
from functools import partial

from router.config import ServedModelConfig
from router.journal import PLAIN_TERMS, Prompt, PromptTerms
from router.replica_set import ReplicaSet
from router.text.conversation import Conversation
from router.text.grammar_check import GrammarCheck
from router.text.grammars import WantedGrammar
from router.text.reasoning import REASONING, ReasoningSyntax
from router.text.tokenizer import Tokenizer
from router.text.tools.formats import FORMATS, ToolFormat, format_of_template
from router.tokenizing import Tokenizing
from router.trace_recorder import TraceRecorder
from workers.engine.errors import PromptTooLong


class ServedModel:
    """One model: its text side, and the replicas that run it."""

    def __init__(
        self,
        config: ServedModelConfig,
        tokenizer: Tokenizer,
        replicas: ReplicaSet,
        tokenizing: Tokenizing,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._tokenizing = tokenizing
        self.replicas = replicas
        self.recorder = recorder
        self._grammars = GrammarCheck(tokenizer.table, tokenizer.special_token_ids)

    @property
    def num_grammars(self) -> int:
        """Grammars known to compile."""
        return self._grammars.num_remembered

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.config.served_names[0]

    @property
    def tool_format(self) -> ToolFormat:
        """How it writes calls: as configured, else as its template teaches."""
        chosen = self.config.tool_call_parser
        return FORMATS[chosen] if chosen is not None else format_of_template(self.tokenizer.template_source)

    @property
    def reasoning(self) -> ReasoningSyntax | None:
        """How it marks its thinking; None if that is not told apart."""
        chosen = self.config.reasoning_parser
        return REASONING[chosen] if chosen is not None else None

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output: the configured limit, or what the smallest open replica takes."""
        return min([self.config.max_model_len, *(shape.max_model_len for shape in self.replicas.shapes())])

    async def stop(self) -> None:
        """End its streams, and close its trace. Safe to call twice."""
        await self.replicas.stop()
        self._grammars.close()
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)

    async def prompt_of_chat(self, chat: Conversation, terms: PromptTerms = PLAIN_TERMS) -> Prompt:
        """Tokenize a conversation by the model's template."""
        if self.tokenizer.chat_template is not None:
            self._check_length(chat.num_content_chars, terms, "messages")
        work = partial(self._tokenize_chat, chat, terms)
        return self._checked(await self._tokenizing.run(chat.num_bytes, work), "messages")

    async def prompt_of_text(
        self,
        text: str,
        terms: PromptTerms = PLAIN_TERMS,
        param: str = "prompt",
        *,
        add_special_tokens: bool = True,
    ) -> Prompt:
        """Tokenize a prompt that is text and that errors call ``param``."""
        self._check_length(len(text), terms, param)
        work = partial(self._tokenize_text, text, terms, add_special_tokens)
        return self._checked(await self._tokenizing.run(len(text), work), param)

    async def token_ids_of_text(
        self, text: str, param: str = "prompt", *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a text that errors call ``param``, however many they are.

        Raises:
            InvalidRequest: it is longer than ``Limits.max_unbounded_chars``.
        """
        self._tokenizing.check_unbounded(len(text), param)
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._tokenizing.run(len(text), encode)

    async def token_ids_of_chat(self, chat: Conversation) -> list[int]:
        """Token ids of a conversation, however many they are.

        Raises:
            InvalidRequest: it is longer than ``Limits.max_unbounded_chars``.
        """
        self._tokenizing.check_unbounded(chat.num_content_chars, "messages")
        return await self._tokenizing.run(chat.num_bytes, partial(self._unbounded_ids, chat))

    def check_num_ids(self, num_ids: int, param: str) -> None:
        """Refuse more token ids than are looked at where no model bounds them."""
        self._tokenizing.check_unbounded(num_ids, param, "token ids")

    def prompt_of_ids(
        self, token_ids: list[int], terms: PromptTerms = PLAIN_TERMS, param: str = "prompt"
    ) -> Prompt:
        """Take a prompt that is tokens and that errors call ``param``."""
        if terms.keep_last is not None:
            self.check_num_ids(len(token_ids), param)
        return self._checked(Prompt(token_ids, terms), param)

    async def check_grammar(self, grammar: WantedGrammar | None) -> None:
        """Return if replicas can follow the grammar.

        Raises:
            InvalidRequest: they cannot; it names the field that asked for it.
        """
        if grammar is not None:
            await self._grammars.check(grammar.text, grammar.param)

    def _tokenize_chat(self, chat: Conversation, terms: PromptTerms) -> Prompt:
        text = self.tokenizer.spell_chat(chat.spelled(), chat.options)
        self._check_length(text.num_chars, terms, "messages")
        return self._hashed(Prompt(self.tokenizer.encode_spelled(text), terms))

    def _unbounded_ids(self, chat: Conversation) -> list[int]:
        text = self.tokenizer.spell_chat(chat.spelled(), chat.options)
        self._tokenizing.check_unbounded(text.num_chars, "messages")
        return self.tokenizer.encode_spelled(text)

    def _tokenize_text(self, text: str, terms: PromptTerms, add_special_tokens: bool) -> Prompt:
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._hashed(Prompt(token_ids, terms))

    def _hashed(self, prompt: Prompt) -> Prompt:
        """Hash while off the event loop, where it is long, for the kinds of replicas that are there now."""
        if len(prompt) < self.max_model_len:
            for shape in self.replicas.shapes():
                prompt.hashes(shape)
        return prompt

    def _check_length(self, num_chars: int, terms: PromptTerms, param: str) -> None:
        """Refuse, without tokenizing, megabytes that cannot fit, or of which few tokens would be kept."""
        if terms.keep_last is not None:
            self._tokenizing.check_unbounded(num_chars, param)
            return
        least = self.tokenizer.least_num_tokens(num_chars)
        self._check_fits(least, terms, f"{num_chars} characters, which are at least {least} tokens", param)

    def _checked(self, prompt: Prompt, param: str) -> Prompt:
        self._check_fits(len(prompt), prompt.terms, f"{len(prompt)} tokens", param)
        return prompt

    def _check_fits(self, num_tokens: int, terms: PromptTerms, told: str, param: str) -> None:
        most = self.max_model_len
        if num_tokens + terms.has_output > most:
            answer = " with its output" if terms.has_output else ""
            raise PromptTooLong(
                f"prompt has {told}, this model takes {most}{answer}: shorten the prompt", param
            )
