"""Benchmarks: `python -m scripts.bench --help`."""
