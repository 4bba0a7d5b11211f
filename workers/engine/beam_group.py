"""The requests that are the beams of one search: they run side by side and step together.

The first, the *leader*, waits, is admitted and preempted for all. The others hold places in the batch while it does
and blocks once there are beams for them; they stand in no other queue than the running one.
"""

from __future__ import annotations

from workers.engine.beam_search import BeamSearch, Candidates, Step
from workers.engine.plan import TokenLogprobs
from workers.engine.request_state import RequestState, Status


class BeamGroup:
    """One search and the requests that compute it. Changed by engine and scheduler alone."""

    __slots__ = ("_noted", "members", "search")

    def __init__(self, search: BeamSearch, members: list[RequestState]) -> None:
        """Take over ``members``, as many as the search may have beams."""
        self.search = search
        self.members = members
        self._noted: dict[int, Candidates] = {}
        """Of this step, by beam."""
        for member in members:
            member.group = self
            member.payer = members[0]

    @property
    def leader(self) -> RequestState:
        """Who stands in queues for all."""
        return self.members[0]

    @property
    def beams(self) -> list[RequestState]:
        """Those that are beams at present: the first ones."""
        return self.members[: self.search.num_beams]

    @property
    def last_step_id(self) -> int:
        """The last step planned that touches blocks of any."""
        return max(member.last_step_id for member in self.members)

    @property
    def num_in_flight(self) -> int:
        """Results to come."""
        return sum(member.num_in_flight for member in self.members)

    @property
    def num_common_tokens(self) -> int:
        """Leading tokens that all beams have in common."""
        first, *others = (beam.token_ids for beam in self.beams)
        return min((_num_equal(first, other) for other in others), default=len(first))

    def note(self, member: RequestState, logprobs: TokenLogprobs) -> None:
        """Take in what may follow one beam."""
        index = self.members.index(member)
        self._noted[index] = list(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))

    def disband(self) -> None:
        """All have left the batch; what has been noted of this step is to be computed again."""
        self._noted.clear()
        for member in self.members:
            member.awaits_mask = False
        for member in self.members[1:]:
            member.status = Status.HELD

    @property
    def is_complete(self) -> bool:
        """True if every beam's candidates are here."""
        return len(self._noted) == self.search.num_beams

    def advance(self) -> list[Step]:
        """Choose which beams go on, all candidates being here."""
        steps = self.search.advance([self._noted[index] for index in range(len(self._noted))])
        self._noted.clear()
        return steps

    def hold(self) -> None:
        """Let none compute again whose last step has not been answered and the answer acted on."""
        for index, beam in enumerate(self.beams):
            beam.awaits_mask = bool(beam.num_in_flight) or index in self._noted

    def check(self) -> None:
        """Raise ``AssertionError`` if a member is where it cannot be."""
        statuses = [member.status for member in self.members[1:]]
        assert set(statuses) <= {Status.HELD, Status.RUNNING}, "a beam waits beside its leader"
        if self.leader.status is not Status.RUNNING:
            assert Status.RUNNING not in statuses, "a beam runs without its leader"


def _num_equal(one: list[int], other: list[int]) -> int:
    """Leading items that are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
