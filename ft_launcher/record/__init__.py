"""What the launcher writes for people and programs: journal, console, logs, files of NVIDIA's launcher."""
