"""The store of a job, and the stores that it can be: torch's TCPStore, a folder of files, etcd (API v3)."""
