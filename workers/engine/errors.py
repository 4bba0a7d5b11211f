"""Everything that Shoal raises on purpose, as one tree.

    ShoalError
    ├── UserError            the caller's mistake: value, limit and way out; changes nothing
    │   ├── InvalidRequest   a field has a wrong value (`param` names it)
    │   ├── GrammarNotFollowed  an accepted grammar outgrew what can be followed
    │   ├── PromptTooLong    prompt (and output) cannot fit the model's context or the KV pool
    │   ├── UnknownModel     no such model here
    │   ├── PromptsFailed    (`deploy.offline`) some of a call's prompts failed while others finished
    │   └── Forbidden        a valid key that is not for this
    ├── Overloaded           full at the moment; the same request may pass later
    │   └── RateLimited      full for this caller: a limit of its key is reached
    ├── RankLost             a rank of a tensor-parallel group is gone: the whole group must end
    ├── ReplicaLost          the replica died or stalled; the request can go on elsewhere
    ├── ShuttingDown         this endpoint is being stopped; another one, or the next, may serve the same request
    └── OutOfBlocks          internal: fewer free blocks than asked for; nothing was taken

The HTTP and gRPC status of each is decided in one table at the edge (`router/openai/errors.py`).
"""


class ShoalError(Exception):
    """Base of all errors that Shoal raises on purpose."""


class UserError(ShoalError):
    """The caller's mistake. ``param`` names the field at fault, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(UserError):
    """A field holds a value that cannot be served."""


class GrammarNotFollowed(UserError):
    """A grammar has grown beyond a limit of this server while its output was made."""


class PromptTooLong(UserError):
    """The prompt does not fit; the message names its length and the limit."""


class UnknownModel(UserError):
    """The model asked for is not served here, or not found."""


class Overloaded(ShoalError):
    """No capacity at the moment; ``retry_after_s`` is when to try again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """A limit of the caller's own; others are still served."""


class Forbidden(UserError):
    """The caller is known and has no right to this."""


class ReplicaLost(ShoalError):
    """The replica behind a stream died or stopped making progress."""


class ShuttingDown(ShoalError):
    """The endpoint that was asked is being stopped."""


class OutOfBlocks(ShoalError):
    """Fewer blocks are free than were asked for; nothing was taken."""


class RankLost(ShoalError):
    """A rank of the group is gone; the whole group must end."""
