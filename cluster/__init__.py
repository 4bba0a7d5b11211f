"""Replica groups on Ray: placement groups, the replica, its ranks, health and drain."""
