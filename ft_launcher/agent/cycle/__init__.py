"""One cycle of this node's ranks: its state, its evidence, and faults on purpose."""
