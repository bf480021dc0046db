"""etcd as the store of a job: the clients for API v2 and v3, and the records kept there."""
