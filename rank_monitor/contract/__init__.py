"""What launcher, monitor and client share: messages, channel, settings, names of variables, exit codes, errors.

The one package that the launcher, the monitor and the client all import. Standard library only.
"""
