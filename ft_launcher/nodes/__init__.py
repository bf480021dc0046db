"""How the nodes of a job agree: who takes part in a cycle, in which order, and what follows its end.

Every agent sends messages to the job's inbox in the rendezvous' store; one agent, the coordinator, reads and answers.
`messages` says what is sent; `coordinator`, `formation` and `membership` decide and `silence` tells who is lost (all
pure); `job_store` speaks to the store and `coordination` runs the coordinator. `link` is the node's side, for
`node_rendezvous.py`, above.
"""
