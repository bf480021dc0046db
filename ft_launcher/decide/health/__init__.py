"""What a health check is, and what its answer means for the node."""
