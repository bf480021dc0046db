"""What is written down for people and programs: journal, console, logs, ledger of the job's time."""
