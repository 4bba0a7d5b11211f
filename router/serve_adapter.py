"""Ray Serve's request router as a source of membership; the only file of this floor that knows Ray.

No request is routed here: tokens flow over gRPC, and placement is the ingress's own. A handle in the
ingress process makes Serve construct this class there, on Serve's router thread, and keep it told.
"""

from __future__ import annotations

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from router import membership

ADDRESS_KEY = "grpc_address"
"""What a replica's ``record_replica_metadata`` must hold: ``host:port`` of its gRPC server."""


class MembershipRequestRouter(FIFOMixin, RequestRouter):
    """Publishes each running replica's gRPC address to this process's membership.

    Name it as ``"router.serve_adapter:MembershipRequestRouter"`` in the replicas' ``RequestRouterConfig``,
    with ``request_router_kwargs={"group": ...}`` where an ingress serves several models.
    """

    def initialize_state(self, **kwargs: str) -> None:
        """Take ``group``: the membership group that this deployment's replicas form."""
        self._group = kwargs.get("group", "")

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Hand the set over to the ingress; a replica without an address is not ready yet."""
        super().update_replicas(replicas)
        members: dict[str, str] = {}
        for replica in replicas:
            address = replica.replica_metadata.get(ADDRESS_KEY)
            if address:
                members[replica.replica_id.unique_id] = str(address)
        membership.shared().publish(self._group, members)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank all replicas alike: only calls that carry no tokens come this way."""
        return [candidate_replicas]
