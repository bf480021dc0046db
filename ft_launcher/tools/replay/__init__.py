"""What a journal says was decided, decided again by the same machines from what the journal says they knew."""
