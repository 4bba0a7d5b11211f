"""Commands that take the flags of engines: their help, and what to say to those who know other servers' flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploy.grouped_help import GroupedHelp

_NODES = (
    "a group of ranks takes GPUs of several nodes by --tensor-parallel-size alone: join them to one Ray cluster and "
    "put the model on it with `shoal deploy` (deploy/docs/tensor-parallel.md)"
)
_LAYERS = "layers are not cut into stages: share the model by --tensor-parallel-size"
INSTEAD: Mapping[str, str] = {
    "--pipeline-parallel-size": _LAYERS,
    "-pp": _LAYERS,
    "--data-parallel-size": "copies of the model are --replicas (of a model of `shoal deploy`: replicas)",
    "-dp": "copies of the model are --replicas (of a model of `shoal deploy`: replicas)",
    "--nnodes": _NODES,
    "--node-rank": _NODES,
    "--master-addr": _NODES,
    "--master-port": _NODES,
    "--distributed-executor-backend": "ranks are always actors of Ray: leave it out",
}
"""Flags of vLLM that have another name here, or none."""


class EngineCommand(GroupedHelp):
    """A command with the flags of engines."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read ``args``; a flag that is vLLM's alone is told with what does the same here."""
        own = args[: args.index("--")] if "--" in args else args
        for argument in own:
            flag = argument.partition("=")[0]
            if flag in INSTEAD:
                ctx.fail(f"No such option: {flag}; {INSTEAD[flag]}")
        return super().parse_args(ctx, args)
