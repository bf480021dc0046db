"""The rank processes of this node: how they are started, their environment, their devices and their monitors."""
