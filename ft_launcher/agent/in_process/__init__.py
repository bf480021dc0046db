"""In-process restart of one cycle as the agent of a node sees it: who takes part, and when a restart took too long."""
