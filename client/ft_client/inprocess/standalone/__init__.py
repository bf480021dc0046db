"""Replaces the launcher where a wrapped function runs without one: a companion process for each rank."""
