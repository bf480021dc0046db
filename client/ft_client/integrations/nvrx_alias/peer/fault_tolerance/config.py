"""`nvidia_resiliency_ext.fault_tolerance.config`."""

from ft_client.integrations.nvrx_alias.config import FaultToleranceConfig

__all__ = ["FaultToleranceConfig"]
