"""The keys of in-process restart in the ranks' store, and their meaning."""
