"""Messages between processes as bytes, and the bounded readers of what others wrote."""
