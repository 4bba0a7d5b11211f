"""What is told of each request when it has ended: a line of log, and a trace if traces are wanted."""
