"""This rank's end of its monitor's watch: the connection, and what is sent over it."""
