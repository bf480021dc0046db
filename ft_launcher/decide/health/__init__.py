"""What a health check is, and what its answer means for the node. `node/health/` has the checks and runs them."""
