"""The page at ``/ui``: what a cluster does, live, for whoever runs it."""
