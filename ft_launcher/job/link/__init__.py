"""A node's connection to the coordinator, and the threads that keep it and run the coordinator."""
