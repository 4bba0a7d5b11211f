"""Who has which row of the batch, and what ranks are told when rows change hands.

A search has rows for all its beams from its leader's entry to its leaving, whether there are as many beams or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.engine.beam_group import BeamGroup
from workers.engine.beam_search import Step
from workers.engine.draft import Draft
from workers.engine.kv_cache import KVCache
from workers.engine.plan import Branch, NewRow
from workers.engine.request_queue import RequestQueue
from workers.engine.request_state import NO_ROW, RequestState, Status


class BatchRows:
    """The requests that run, each in a row of its own, and the rows that are free."""

    def __init__(self, num_rows: int, cache: KVCache) -> None:
        self._cache = cache
        self._free = list(range(num_rows - 1, -1, -1))
        self._branches: list[Branch] = []
        """For the next plan with rows."""
        self.running = RequestQueue()
        self.groups: list[BeamGroup] = []
        """Searches whose leaders run."""

    @property
    def num_free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    def enter(self, draft: Draft, request: RequestState) -> None:
        """Give a row to a request that has its first blocks; the leader of a search takes those of all its beams."""
        request.row = self._free.pop()
        if request.group is not None:
            for member in request.group.members[1:]:
                member.row = self._free.pop()
            self.groups.append(request.group)
        self.join(draft, request)

    def join(self, draft: Draft, request: RequestState) -> None:
        """Let a request that has a row run in it."""
        request.status = Status.RUNNING
        request.num_known_at_start = len(request.token_ids)
        self.running.add(request)
        params = request.request.params.for_ranks
        draft.new_rows.append(
            NewRow(request.row, request.token_ids.copy(), request.num_prompt_tokens, params)
        )

    def leave(self, request: RequestState) -> None:
        """Take the row and the blocks of a request that runs, and those of all its beams."""
        group = request.group
        for member in [request] if group is None else group.members:
            if member.status is Status.RUNNING:
                self.running.remove(member)
            self._cache.retire(member)
            self._free.append(member.row)
            member.row = NO_ROW
        if group is not None:
            group.disband()
            self.groups.remove(group)

    def rearrange(self, group: BeamGroup, before: Sequence[RequestState], steps: Sequence[Step]) -> None:
        """Let beams go on as their search has chosen: each from one of those ``before``, with one token more."""
        beams = group.members[: len(steps)]
        sources = [before[step.parent] for step in steps]
        num_blocks = self._cache.rearrange(before, beams, sources)
        known = [(source.token_ids, source.block_hashes) for source in before]
        for member in before[len(steps) :]:
            self.running.remove(member)
            member.status = Status.HELD
        for beam, step, source, count in zip(beams, steps, sources, num_blocks, strict=True):
            token_ids, block_hashes = known[step.parent]
            beam.token_ids = [*token_ids, step.token_id]
            beam.block_hashes = block_hashes.copy()
            beam.awaits_mask = False
            if beam.status is Status.HELD:
                beam.status = Status.RUNNING
                beam.num_known_at_start = source.num_known_at_start
                self.running.add(beam)
            self._branches.append(Branch(beam.row, source.row, len(token_ids), step.token_id, count))

    def take_branches(self) -> list[Branch]:
        """What the next plan has to carry."""
        branches, self._branches = self._branches, []
        return branches

    def check(self, num_rows: int) -> None:
        """Raise ``AssertionError`` if a row is lost or taken twice."""
        self.running.check()
        held = [one for group in self.groups for one in group.members if one.status is Status.HELD]
        rows = [request.row for request in (*self.running, *held)] + self._free
        assert sorted(rows) == list(range(num_rows)), "a row is lost or taken twice"
        for group in self.groups:
            group.check()
        for request in self.running:
            assert request.status is Status.RUNNING, (
                f"request {request.request_id} runs but is {request.status}"
            )
            assert request.num_lag >= (request.group is None), (
                f"request {request.request_id} computed tokens that do not exist"
            )
