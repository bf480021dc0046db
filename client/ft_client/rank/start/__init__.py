"""Makes a rank process what `python SCRIPT` is, or has it call a function."""
