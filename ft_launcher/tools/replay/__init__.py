"""Makes the decisions in a journal again, by the same code and from the inputs that the journal holds. Pure.

`replay.py` goes through journals and compares; `again.py` decides. A difference means that this release would have
decided otherwise, or that a decision was made from something that the journal does not have. Either is worth a look:
`ft_launcher replay` prints it, and every test that breaks a real job replays the journals of that job
(`tests/faults/invariants.py`, I6).
"""
