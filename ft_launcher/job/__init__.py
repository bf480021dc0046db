"""The protocol by which the nodes of a job agree: which take part in a cycle, in which order, and what follows its end.

Every agent sends messages to the job's inbox in the rendezvous' store. One agent of them runs the coordinator, which
reads the messages in one order and answers, so that there is one decision for all nodes. A job of one node has the same
coordinator, in its own process and without a store.

    rendezvous/    torch's handler interface, for the agent: a place in the next cycle, and the store of that cycle
    link/          the node's side: sends, awaits, beats; runs the coordinator where this node has become it
    coordinator/   the messages, and what is decided by them. Pure
    store/         the job's store over TCPStore, etcd or files, as an inbox, counters and one record

Each folder imports only folders below it, `decide/policy/` and `rank_monitor/contract/`; `store/` and `coordinator/`
do not know each other. Nothing here starts or ends a rank, and nothing imports `node/`: `agent/` has both.

Where to begin: `coordinator/node_messages.py` says what is sent, `coordinator/coordinator.py` what follows from it,
`link/node_link.py` which thread does what.
"""
