"""The file of events, and the thread and the access rights by which files are written."""
