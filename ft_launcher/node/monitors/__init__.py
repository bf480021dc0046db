"""The monitors of this node's ranks, as the launcher knows them."""
