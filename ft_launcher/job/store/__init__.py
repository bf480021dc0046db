"""The store of a job, and the stores that it can be: torch's, a folder, etcd (API v2 and v3)."""
