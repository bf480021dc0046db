"""Says what a running job does: as a page, JSON and metrics over HTTP, to commands over a Unix socket, and as traces.

Two things flow in. The events of the journal go to `node_status.py`, which adds them up. What ranks do now is read only
when somebody asks: `answers.py` has `asking.py` wake the agent's loop, in which `status_feed.py` asks the monitors.
`summary.py`, `metrics.py` and `trace_export.py` give both a form; `status_server.py` and `listening.py` serve it.
`job_nodes.py` brings what other nodes know of their ranks. Nothing here ends a rank, and no request slows the training
down.
"""
