"""Every setting: its kind, default and check."""
