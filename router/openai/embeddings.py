"""``POST /v1/embeddings``: a decoder's last hidden states, pooled into one vector for each text.

The engine computes the prompt and nothing more; the vector comes up with its only step's output.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from router.generation import Choice, Delta, Generation, TextParams
from router.ingress import Ingress
from router.journal import POOLED_TERMS, Prompt
from router.openai.answer import GenerationResponse
from router.openai.metrics import Metrics
from router.openai.sampling import check_token_ids, name_of_input
from router.openai.schema import Body, input_kind
from router.served_model import ServedModel
from workers.engine.errors import InvalidRequest, ShoalError
from workers.engine.request import ChoiceParams


class EmbeddingBody(Body):
    """Body of ``POST /v1/embeddings``; the fields after ``user`` are vLLM's additions to OpenAI's."""

    model: str
    input: Annotated[
        Annotated[str, Field(min_length=1), Tag("<one>")]
        | Annotated[
            list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True), Tag("<many>")
        ]
        | Annotated[list[int], Field(fail_fast=True), Tag("<ids>")]
        | Annotated[
            list[Annotated[list[int], Field(min_length=1, fail_fast=True)]],
            Field(fail_fast=True),
            Tag("<id lists>"),
        ],
        Discriminator(input_kind),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    """Keep this many leading numbers, and bring what is left to length 1 again."""
    user: str | None = None
    """Accepted without effect."""
    pooling: Literal["mean", "last"] | None = None
    """Of the hidden states of all tokens (the default), or that of the last token."""
    normalize: bool | None = None
    """Bring vectors to length 1. (default: true)"""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep this many of the last tokens of a longer text; -1: as many as the model takes."""

    @property
    def inputs(self) -> list[str | list[int]]:
        """All texts, each text or token ids."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]  # type: ignore[list-item]
        return list(self.input)  # type: ignore[arg-type]


async def answer_embeddings(
    ingress: Ingress, metrics: Metrics, body: EmbeddingBody, request_id: str
) -> GenerationResponse:
    """Check a body, tokenize it, and prepare the answer; nothing runs yet.

    Raises:
        UserError: the body asks for what this model cannot give.
    """
    model = ingress.model(body.model)
    inputs = body.inputs
    if len(inputs) > ingress.limits.max_inputs:
        raise InvalidRequest(
            f"input: {len(inputs)} texts, the limit is {ingress.limits.max_inputs}: send several requests",
            "input",
        )
    if body.truncate_prompt_tokens == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens: 0 leaves nothing, give 1 or more, or -1", "truncate_prompt_tokens"
        )
    prompts = [
        await _prompt(model, text, name_of_input(body.input, place, "input"), body.truncate_prompt_tokens)
        for place, text in enumerate(inputs)
    ]
    params = ChoiceParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=body.pooling or "mean")
    generation = ingress.generation(model, f"embd-{request_id}", prompts, [params], TextParams())
    return GenerationResponse(generation, EmbeddingEncoder(body), metrics.timer(model.name), is_stream=False)


class EmbeddingEncoder:
    """Says the vectors of a generation as OpenAI's embeddings do. Never streamed."""

    def __init__(self, body: EmbeddingBody) -> None:
        self._body = body

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def chunk(self, delta: Delta) -> bytes:
        """Nothing."""
        return b""

    def finish(self, generation: Generation) -> bytes:
        """Nothing."""
        return b""

    def collect(self, deltas: Iterable[Delta]) -> None:
        """Tokens are of no interest."""

    def whole(self, generation: Generation) -> dict[str, Any]:
        """A list of ``embedding`` objects."""
        num_tokens = generation.num_prompt_tokens
        data = [
            {"object": "embedding", "index": choice.index, "embedding": self._vector(choice)}
            for choice in generation.choices
        ]
        return {
            "object": "list",
            "data": data,
            "model": self._body.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _vector(self, choice: Choice) -> list[float] | str:
        if not choice.pooled:
            raise ShoalError("the replica sent no vector")
        values = array("f", choice.pooled)
        dimensions = self._body.dimensions
        if dimensions is not None and dimensions > len(values):
            raise InvalidRequest(
                f"dimensions: {dimensions} asked for, the model's vectors have {len(values)}", "dimensions"
            )
        values = values[:dimensions]
        if self._body.normalize is not False:
            length = math.sqrt(math.fsum(value * value for value in values))
            if length > 0:
                values = array("f", [value / length for value in values])
        if self._body.encoding_format == "base64":
            return base64.b64encode(values.tobytes()).decode()
        return values.tolist()


async def _prompt(model: ServedModel, text: str | list[int], param: str, keep: int | None) -> Prompt:
    """Tokenize one input, cut to its last ``keep`` tokens where asked for; errors call it ``param``."""
    if isinstance(text, list):
        if keep is not None:
            model.check_num_ids(len(text), param)
        kept = text if keep is None else _last(text, keep, model)
        found = model.prompt_of_ids(kept, POOLED_TERMS, param)  # first, since it refuses millions at once
        check_token_ids(text, len(model.tokenizer.table), param)
        return found
    if keep is None:
        return await model.prompt_of_text(text, POOLED_TERMS, param)
    token_ids = await model.token_ids_of_text(text, param)
    return model.prompt_of_ids(_last(token_ids, keep, model), POOLED_TERMS, param)


def _last(token_ids: list[int], keep: int, model: ServedModel) -> list[int]:
    return token_ids[-(model.max_model_len if keep == -1 else keep) :]
