"""What the three processes agree on: messages, channel, settings, names of variables, exit codes, errors.

The one package that the launcher, the monitor and the client all import. Standard library only.
"""
