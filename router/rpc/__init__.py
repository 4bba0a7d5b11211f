"""The API for users over gRPC: the contract, the service, the server."""
