"""Generation without a server or Ray: the brain and its rank in this process."""
