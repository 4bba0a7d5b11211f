"""The contract between router and replica, as gRPC messages."""
