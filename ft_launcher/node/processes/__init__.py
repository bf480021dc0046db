"""Process trees, signals and descriptors of this host."""
