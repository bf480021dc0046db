"""`nvidia_resiliency_ext`, as scripts see it under the alias. Loaded under that name only."""

__version__ = "0.6.0"
__ft_alias__ = True
