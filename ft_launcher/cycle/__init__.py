"""One cycle of this node's ranks: its state, its evidence, and in-process restart as the agent sees it."""
