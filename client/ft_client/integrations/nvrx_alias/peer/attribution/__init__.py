"""`nvidia_resiliency_ext.attribution`: straggler detection stands below it, and nothing else."""
