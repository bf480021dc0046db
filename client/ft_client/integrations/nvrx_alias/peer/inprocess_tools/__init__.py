"""`nvidia_resiliency_ext.inprocess.tools`: where `inject_fault` stood in the peer's earlier versions."""

from ft_client.integrations.nvrx_alias import inject_fault

__all__ = ["inject_fault"]
