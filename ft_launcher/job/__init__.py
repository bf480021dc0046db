"""The protocol by which the nodes of a job agree: which take part in a cycle, in which order, and what follows its end.

Every agent sends messages to the job's inbox in the rendezvous' store; one agent, the coordinator, reads and answers.
`node_messages` says what is sent; `coordinator` and `formation` decide and `beat_schedule` says who is lost (all pure);
`job_store` speaks to the store and `coordinator_service` runs the coordinator. `node_link` is the node's side, for
`job/rendezvous/handler.py`, above.
"""
