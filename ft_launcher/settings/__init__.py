"""Command line, YAML and environment in, settings out."""
