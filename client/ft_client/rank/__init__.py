"""What runs in every rank, whichever tools it uses."""
