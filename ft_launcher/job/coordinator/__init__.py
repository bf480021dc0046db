"""The coordinator of a job: messages of nodes in, cycles and answers out. Pure."""
