"""``use_beam_search``: the likeliest outputs instead of sampled ones, as vLLM's API and transformers have it."""

from __future__ import annotations

from router.openai.schema import SamplingBody
from workers.engine.errors import InvalidRequest
from workers.engine.request import MAX_BEAM_WIDTH, BeamParams


def beam_params(body: SamplingBody) -> BeamParams | None:
    """How to search; None if the body asks for sampling. What sampling alone looks at is without effect.

    Raises:
        InvalidRequest: fields that have no meaning together; the engine refuses further ones.
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
    if body.stop_strings:
        raise InvalidRequest(
            "stop: not together with use_beam_search, which knows tokens alone: give stop_token_ids", "stop"
        )
    num_given = body.n or 1
    width = body.best_of or num_given
    if width > MAX_BEAM_WIDTH:
        param = "best_of" if body.best_of else "n"
        raise InvalidRequest(f"{param}: {width} beams are asked for, the limit is {MAX_BEAM_WIDTH}", param)
    early = body.early_stopping
    return BeamParams(
        width,
        1.0 if body.length_penalty is None else body.length_penalty,
        early if isinstance(early, bool) else None,
    )
