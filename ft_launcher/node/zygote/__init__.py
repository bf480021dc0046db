"""One import of torch for all ranks of a node: the process that is forked for each rank."""
