"""Replaces the launcher where a wrapped function runs without one: each rank has a standalone agent."""
