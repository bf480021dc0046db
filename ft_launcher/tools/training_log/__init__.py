"""Steps of a training from what its ranks print (`--ft-watch-log`). `log_watch.py` acts, all others are pure."""
