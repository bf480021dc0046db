"""The rank processes of this node: how they are started, their environment and their devices."""
