"""One value over all ranks of a process group: votes, flags and limits that every rank must see alike."""
