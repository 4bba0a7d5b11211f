"""What offline generation raises when prompts fail that were no mistake until their output was made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from deploy.offline.outputs import RequestOutput
from workers.engine.errors import UserError


class PromptsFailed(UserError):
    """Some prompts ended by an error of their own; ``outputs`` has those of all, the others' complete.

    vLLM refuses a call for what it sees beforehand, as Shoal does; what shows only while tokens are sampled would
    otherwise be an output that nobody looks at.
    """

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        """Name the first that failed, and count the others."""
        self.outputs = list(outputs)
        self.failed = [index for index, one in enumerate(outputs) if _error(one) is not None]
        """Their places among the prompts."""
        first = self.failed[0]
        others = f"; so failed {len(self.failed) - 1} more" if len(self.failed) > 1 else ""
        super().__init__(
            f"prompt {first} of {len(outputs)} (from 0): {_error(outputs[first])}{others}; what all prompts gave is in "
            "the error's outputs",
            "prompts",
        )


def raise_failures(outputs: Sequence[RequestOutput]) -> None:
    """Return if no output ended by an error.

    Raises:
        PromptsFailed: some did.
    """
    if any(_error(one) is not None for one in outputs):
        raise PromptsFailed(outputs)


@contextmanager
def naming_prompt(index: int, num_prompts: int) -> Iterator[None]:
    """Say in a user's error which of several prompts it is about."""
    try:
        yield
    except UserError as error:
        if num_prompts == 1:
            raise
        message = f"prompt {index} of {num_prompts} (from 0): {error.message}"
        raise type(error)(message, error.param) from error


def _error(output: RequestOutput) -> str | None:
    return next((one.error for one in output.outputs if one.error is not None), None)
