"""One output being built: tokens in, text and finish reason out."""

from __future__ import annotations

from deploy.offline.outputs import CompletionOutput, Logprob, RequestOutput
from deploy.offline.sampling_params import SamplingParams
from router.text.detokenizer import Detokenizer
from router.text.stop import StopMatcher, StopStrings
from router.text.tokenizer import Tokenizer
from workers.engine.outputs import TokenOutput
from workers.engine.plan import TokenLogprobs


class Choice:
    """Collects one of a request's ``n`` outputs."""

    def __init__(
        self,
        request: RequestOutput,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        stops: StopStrings,
    ) -> None:
        """``stops`` are those of ``params``, shared by all choices."""
        self.request = request
        self._output = CompletionOutput(index)
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = None
        if self._tokenizer is not None:
            self._detokenizer = Detokenizer(
                self._tokenizer.table, skip_special_tokens=params.skip_special_tokens
            )
        self._stop = StopMatcher(stops, include_in_output=params.include_stop_str_in_output)
        self._pieces: list[str] = []
        if params.logprobs is not None:
            self._output.logprobs = []
        if params.logprobs is not None or params.is_contest:
            self._output.cumulative_logprob = 0.0
        request.outputs.append(self._output)

    def take(self, new: TokenOutput) -> bool:
        """Add new tokens.

        Returns:
            True if the output has ended, by the engine's word or by a stop string.
        """
        if new.num_cached_tokens is not None:
            self.request.num_cached_tokens = new.num_cached_tokens
        self.request.num_preemptions = max(self.request.num_preemptions, new.num_preemptions)
        if new.prompt_logprobs is not None:
            scored = zip(self.request.prompt_token_ids[1:], new.prompt_logprobs, strict=True)
            self.request.prompt_logprobs = [None, *(self._candidates(*one) for one in scored)]
        for i, token_id in enumerate(new.token_ids):
            self._output.token_ids.append(token_id)
            if new.logprobs is not None:
                self._add_logprobs(token_id, new.logprobs[i])
            if token_id == new.stop_token_id and i == len(new.token_ids) - 1:
                break  # what ends an output is not part of its text
            if self._detokenizer is not None:
                self._pieces.append(self._stop.feed(self._detokenizer.push(token_id)))
                if self._stop.matched is not None:
                    self._end("stop", self._stop.matched)
                    return True
        if new.finish_reason is None:
            return False
        self._output.error = new.error
        user_stops = self._params.stop_token_ids or ()
        self._end(new.finish_reason.value, new.stop_token_id if new.stop_token_id in user_stops else None)
        return True

    def _end(self, finish_reason: str, stop_reason: int | str | None) -> None:
        if self._detokenizer is not None and self._stop.matched is None:
            self._pieces += [self._stop.feed(self._detokenizer.flush()), self._stop.flush()]
        self._output.text = "".join(self._pieces)
        self._output.finish_reason = finish_reason
        self._output.stop_reason = stop_reason
        self.request.finished = len(self.request.outputs) == self._params.num_choices and all(
            output.finish_reason is not None for output in self.request.outputs
        )

    def _add_logprobs(self, token_id: int, found: TokenLogprobs) -> None:
        assert self._output.cumulative_logprob is not None, "logprobs come only where they were asked for"
        self._output.cumulative_logprob += found.sampled
        if self._output.logprobs is not None:
            self._output.logprobs.append(self._candidates(token_id, found))

    def _candidates(self, token_id: int, found: TokenLogprobs) -> dict[int, Logprob]:
        """The likeliest tokens at a place, and the one that stands there, which may be one more."""
        candidates = {
            top_id: Logprob(logprob, rank, self._decode(top_id))
            for rank, (top_id, logprob) in enumerate(
                zip(found.top_token_ids, found.top_logprobs, strict=True), 1
            )
        }
        candidates.setdefault(token_id, Logprob(found.sampled, found.rank, self._decode(token_id)))
        return candidates

    def _decode(self, token_id: int) -> str | None:
        return self._tokenizer.decode([token_id], skip_special_tokens=False) if self._tokenizer else None
