"""What ``LLM.beam_search`` takes and collects; the engine itself searches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from deploy.offline.outputs import BeamSearchSequence, RequestOutput
from deploy.offline.ranges import check_flag, check_integer, check_number
from workers.engine.errors import InvalidRequest
from workers.engine.outputs import TokenOutput
from workers.engine.request import MAX_BEAM_WIDTH, MAX_LENGTH_PENALTY, BeamParams, ChoiceParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search. Names and results are those of vLLM's ``BeamSearchParams``.

    Raises:
        InvalidRequest: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    """Sequences are ranked by log-probability / length ** penalty."""
    early_stopping: bool | Literal["never"] = "never"
    """"never" stops once nothing better can come: results are those of a search to the end; see ``BeamParams``."""

    def __post_init__(self) -> None:
        """Check kinds and ranges."""
        check_integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_integer("max_tokens", self.max_tokens, 1, math.inf)
        check_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        check_flag("ignore_eos", self.ignore_eos)
        if self.early_stopping != "never" and not isinstance(self.early_stopping, bool):
            raise InvalidRequest(
                f"early_stopping is {self.early_stopping!r}, it must be True, False or 'never'",
                "early_stopping",
            )

    @property
    def choice(self) -> ChoiceParams:
        """What the engine is asked for."""
        early = self.early_stopping
        # Numbers may be numpy's, which do not travel to ranks.
        beams = BeamParams(
            int(self.beam_width), float(self.length_penalty), None if early == "never" else early
        )
        return ChoiceParams(
            max_tokens=int(self.max_tokens), temperature=0.0, ignore_eos=self.ignore_eos, beams=beams
        )


class SearchedChoice:
    """Waits for what a beam search finds."""

    def __init__(self, request: RequestOutput) -> None:
        self.request = request
        self.sequences: list[BeamSearchSequence] = []
        """Empty until they have come; best first."""

    def take(self, new: TokenOutput) -> bool:
        """Keep what was found; always the end."""
        assert new.beams is not None, "a beam search ends with its beams"
        self.sequences = [
            BeamSearchSequence(
                [*self.request.prompt_token_ids, *beam.token_ids],
                beam.logprob,
                finish_reason=beam.finish_reason.value,
            )
            for beam in new.beams
        ]
        self.request.finished = True
        return True
