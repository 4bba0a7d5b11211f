"""Messages to prompt text by a model's own Jinja template, in a sandbox and within a time limit.

The environment offers what Hugging Face's templates expect (`transformers.utils.chat_template_utils`);
transformers itself is not imported: it costs an ingress a second and a hundred MiB.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text.tools.prompt import with_tools_told
from workers.engine.errors import InvalidRequest

Message = Mapping[str, object]
"""One chat message as a template sees it: role, content, and whatever else the client gave."""

_TURN = "shoal_loop_turn"
_TURNS_A_LOOK = 256
_LOOPS_OVER_PARTS = re.compile(r"for\s+\w+\s+in\s+\w+(\[['\"]content['\"]\]|\.content)")


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a template is told besides the messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The prompt ends where the last message ends, so that the model goes on with it."""
    tools: Sequence[Mapping[str, Any]] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template's own, ``enable_thinking`` say."""


PLAIN = TemplateOptions()


class ChatTemplate:
    """One compiled template. ``render`` may be called from any thread."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
        timeout_s: float = 5.0,
    ) -> None:
        """Compile ``source``.

        Raises:
            jinja2.TemplateError: it is no template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        tree = environment.parse(source)
        variables = meta.find_undeclared_variables(tree)
        self.takes_tools = "tools" in variables or "tool_calls" in source
        """True if it shows tools to the model."""
        self.takes_parts = bool(_LOOPS_OVER_PARTS.search(source)) and "is string" not in source
        """True if it wants contents in parts, as templates of models that see do."""
        self.knows_developer = "developer" in source
        for loop in tree.find_all(nodes.For):
            turn = nodes.Call(nodes.Name(_TURN, "load"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(turn))
        code = environment.compile(tree)
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        self._special_tokens = dict(special_tokens)
        self._clock = clock
        self._timeout_s = timeout_s

    def render(self, messages: Sequence[Message], options: TemplateOptions = PLAIN) -> str:
        """Prompt text of a conversation.

        Raises:
            InvalidRequest: the template refuses these messages, with its own words in the message, or takes too long.
        """
        given: list[Message] = list(messages)
        if not self.takes_tools:
            given = list(with_tools_told(given, options.tools))
        mark = ""
        if options.continue_final_message:
            mark = secrets.token_hex(16)
            given[-1] = {**given[-1], "content": f"{given[-1].get('content') or ''}{mark}"}
        variables = {
            "documents": None,
            **self._special_tokens,
            **options.kwargs,  # win, as with transformers
            "messages": given,
            "tools": list(options.tools) or None,
            "add_generation_prompt": options.add_generation_prompt,
            _TURN: self._turns(),
        }
        try:
            text = self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        except (RecursionError, OverflowError, MemoryError) as error:
            raise InvalidRequest(
                f"the model's chat template does not come to an end: {type(error).__name__}", "messages"
            ) from error
        if not mark:
            return text
        if mark not in text:
            raise InvalidRequest(
                "the model's chat template does not show the last message as it is: it cannot be continued",
                "continue_final_message",
            )
        return text[: text.rindex(mark)]

    def _turns(self) -> Callable[[], None]:
        """Called at each turn of each loop; looks at the clock now and then."""
        deadline_s = self._clock() + self._timeout_s
        num_turns = 0

        def turn() -> None:
            nonlocal num_turns
            num_turns += 1
            if num_turns % _TURNS_A_LOOK == 0 and self._clock() > deadline_s:
                raise jinja2.TemplateError(f"it takes more than {self._timeout_s:g} s")

        return turn


class _GenerationTag(Extension):
    """``{% generation %}`` marks what an assistant said, for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
