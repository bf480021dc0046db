"""The ledger of a job's time: what the agent did and when, and one rank's ledger, in; seconds by category out."""
