"""The contract between users and an ingress, as gRPC messages."""
