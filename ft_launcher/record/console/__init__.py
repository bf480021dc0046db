"""What the launcher prints, and the queue between it and a console that may not be read."""
