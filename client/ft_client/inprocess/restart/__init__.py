"""The engine of in-process restart: the state machine, one call of a wrapped function, and its interruption."""
