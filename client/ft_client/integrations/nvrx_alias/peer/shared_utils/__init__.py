"""`nvidia_resiliency_ext.shared_utils`: `inject_fault` and `wait_daemon` stand below it."""
