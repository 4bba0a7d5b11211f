"""The public face of Shoal."""
