"""How the nodes of a cycle find each other: torch's rendezvous, its stores and ours."""
