"""``use_beam_search``: the likeliest outputs instead of sampled ones, as vLLM's API and transformers have it."""

from __future__ import annotations

from router.openai.schema import SamplingBody
from workers.engine.errors import InvalidRequest
from workers.engine.request import MAX_BEAM_WIDTH, BeamParams

_CHANGING: tuple[tuple[str, object], ...] = (
    ("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1), ("logit_bias", {}), ("bad_words", []),
    ("allowed_token_ids", None), ("thinking_token_budget", None),
)  # fmt: skip
"""Fields that change what is likely, each with the value that does not."""


def width_param(body: SamplingBody) -> str:
    """The field that says how many beams go on."""
    return "best_of" if body.best_of else "n"


def beam_params(body: SamplingBody, form_param: str | None = None) -> BeamParams | None:
    """How to search; None if the body asks for sampling. What sampling alone looks at is without effect.

    Args:
        form_param: the field that asks for a form of output, if one does.

    Raises:
        InvalidRequest: fields that have no meaning together.
    """
    if not body.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if getattr(body, name) is not None:
                raise InvalidRequest(f"{name}: only allowed with use_beam_search=true", name)
        return None
    if body.stream:
        raise InvalidRequest(
            "use_beam_search: the likeliest outputs are known at the end only, they cannot be streamed",
            "use_beam_search",
        )
    changing = [form_param] if form_param is not None else []
    changing += [name for name, same in _CHANGING if getattr(body, name, None) not in (None, same)]
    if changing:
        raise InvalidRequest(
            f"{changing[0]}: not together with use_beam_search, which ranks by the model's own probabilities",
            changing[0],
        )
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(body, name, None)
        if asked is not None and asked is not False:
            raise InvalidRequest(f"{name}: not together with use_beam_search", name)
    if body.stop_strings:
        raise InvalidRequest(
            "stop: not together with use_beam_search, which knows tokens alone: give stop_token_ids", "stop"
        )
    num_given = body.n or 1
    width = body.best_of or num_given
    if width > MAX_BEAM_WIDTH:
        param = width_param(body)
        raise InvalidRequest(f"{param}: {width} beams are asked for, the limit is {MAX_BEAM_WIDTH}", param)
    early = body.early_stopping
    return BeamParams(
        width,
        1.0 if body.length_penalty is None else body.length_penalty,
        early if isinstance(early, bool) else None,
    )
