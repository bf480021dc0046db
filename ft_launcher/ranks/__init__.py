"""The rank processes of this node: how they are started, their environment, their monitors and their logs."""
