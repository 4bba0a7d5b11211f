"""Which replica a request goes to: pure state and policies, without I/O or a clock."""
