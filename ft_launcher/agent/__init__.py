"""The node agent: torch's hooks, and the loop that starts, watches and ends the ranks of this node."""
