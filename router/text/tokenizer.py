"""Text to token ids, for one model; read once from its files, then shared by all requests.

A prompt that is text may hold the model's control tokens (`<|im_start|>`), as the template writes them. What
a chat user writes may not: see ``Tokenizer.spell_chat``.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tokenizers

from router.text.chat_template import PLAIN, ChatTemplate, Message, TemplateOptions
from router.text.conversation import ChatText
from router.text.detokenizer import TokenTable
from router.text.literals import longest_of
from workers.checkpoint.vocabulary import Vocabulary
from workers.engine.errors import InvalidRequest
from workers.library_failure import is_failure

LONG_TEXT_CHARS = 8192
"""From here on a text is tokenized in a thread: 2 to 4 ms of work, which other streams would feel."""


class Tokenizer:
    """Encodes and decodes. Thread-safe: nothing changes after the constructor."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.table = TokenTable(vocabulary.token_bytes, vocabulary.special_token_ids)
        self.special_token_ids = vocabulary.special_token_ids
        self.chat_template = (
            ChatTemplate(vocabulary.chat_template, vocabulary.special_tokens)
            if vocabulary.chat_template is not None
            else None
        )
        self.template_source = vocabulary.chat_template
        self._bos_to_add = vocabulary.bos_to_add
        self._pipeline = tokenizers.Tokenizer.from_str(vocabulary.pipeline_json)
        self._literal_pipeline = tokenizers.Tokenizer.from_str(vocabulary.pipeline_json)
        self._literal_pipeline.encode_special_tokens = True
        # A normalizer may drop characters: then nothing can be said from a text's length.
        longest = max(map(len, self.table.with_special), default=0)
        self._longest_token_bytes = longest if self._pipeline.normalizer is None else 0
        self._control = longest_of(
            self.table.bytes_of(i).decode("utf-8", "replace") for i in vocabulary.special_token_ids
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.table)

    def least_num_tokens(self, num_chars: int) -> int:
        """Tokens that a text of ``num_chars`` characters has at least, told without looking at it."""
        return -(-num_chars // self._longest_token_bytes) if self._longest_token_bytes else 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; control tokens in it are control tokens."""
        token_ids = _ids(self._pipeline, text, add_special_tokens)
        if add_special_tokens and self._bos_to_add is not None and token_ids[:1] != [self._bos_to_add]:
            token_ids.insert(0, self._bos_to_add)
        return token_ids

    def encode_literally(self, text: str) -> list[int]:
        """Token ids of text in which nothing is a control token."""
        return _ids(self._literal_pipeline, text, False)

    def encode_chat(self, messages: Sequence[Message], options: TemplateOptions = PLAIN) -> list[int]:
        """Token ids of a conversation: ``spell_chat``, then ``encode_spelled``."""
        return self.encode_spelled(self.spell_chat(messages, options))

    def spell_chat(self, messages: Sequence[Message], options: TemplateOptions = PLAIN) -> ChatText:
        """A conversation as the model's template writes it.

        Names of control tokens inside messages stay text: each is replaced by a random word before the
        template runs, and spelled out in ordinary tokens after it. A template that itself looks for such
        names in contents does not find them.

        Raises:
            InvalidRequest: the model has no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions, or serve it with a template",
                "messages",
            )
        hidden: list[str] = []
        nonce = secrets.token_hex(8)

        def hide(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"{nonce}x{len(hidden) - 1}x"

        def safe(value: Message) -> Any:
            return _map_text(value, lambda text: self._control.sub(hide, text))

        shown = replace(options, tools=[safe(tool) for tool in options.tools])
        text = self.chat_template.render([safe(message) for message in messages], shown)
        if not hidden:
            return ChatText((text,))
        split = re.split(f"{nonce}x([0-9]+)x", text)
        return ChatText([hidden[int(piece)] if i % 2 else piece for i, piece in enumerate(split)])

    def encode_spelled(self, chat: ChatText) -> list[int]:
        """Token ids of what a template wrote."""
        literally = {name: self.encode_literally(name) for name in set(chat.pieces[1::2])}
        token_ids: list[int] = []
        for i, piece in enumerate(chat.pieces):
            if i % 2:
                token_ids += literally[piece]
            elif piece:
                token_ids += self.encode(piece, add_special_tokens=False)
        return token_ids

    def special_id(self, name: str) -> int | None:
        """The control token spelled ``name``, if there is one."""
        data = name.encode()
        return next((i for i in self.special_token_ids if self.table.bytes_of(i) == data), None)

    def ends_with(self, token_ids: Sequence[int], text: str) -> bool:
        """True if the last thing that a prompt says, white space aside, is ``text``."""
        tail = self.decode(token_ids[-8 - len(text) :], skip_special_tokens=False)
        return tail.rstrip().endswith(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self.table.decode(token_ids, skip_special_tokens=skip_special_tokens)


def _ids(pipeline: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Of a long text without the interpreter's lock, and without the places of tokens that ``encode`` notes.

    A short one is not worth the way through the library's threads, where it might wait for long ones.

    Raises:
        RuntimeError: the library panicked.
    """
    try:
        if len(text) < LONG_TEXT_CHARS:
            found = pipeline.encode(text, add_special_tokens=add_special_tokens)
        else:
            (found,) = pipeline.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except BaseException as error:
        if isinstance(error, Exception) or not is_failure(error):
            raise
        raise RuntimeError(f"tokenizers panicked: {error}") from error
    token_ids: list[int] = found.ids
    return token_ids


def _map_text(value: object, change: Callable[[str], str]) -> object:
    """Apply ``change`` to every string inside, keys and roles excepted."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {k: v if k in ("role", "type") else _map_text(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(v, change) for v in value]
    return value
