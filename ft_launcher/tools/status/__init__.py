"""What a running job says of itself: its state as JSON, as metrics, as a page, over HTTP and a Unix socket."""
