"""What speaks the language of other packages: Lightning's callbacks, and names of NVIDIA's resiliency extension."""
