"""The training's state in the host's memory, in files that outlive the ranks (docs/memory_checkpoint.md).

`memory_checkpoint.py` has the user's object. How a save goes: `save_vote.py` asks all ranks, also whether what should
be the same on all ranks is so (`replicas.py`); `kept_state.py` takes the objects' states apart into tensors and plain
values; `safetensors_layout.py` plans where each lies in the file; `rank_files.py` picks one of this rank's files, and
`state_writer.py` copies into it, checksums and names it. How a load goes: `agreed_load.py` finds the newest step that
all ranks have whole, `state_reader.py` verifies and reads a file, and `load_report.py` has the lines about it.
`memory_folders.py` has folders for a user's own files, which `latest_folder.py` finds again. `folder_saves.py` says
after which steps a framework's callback writes its checkpoint into one.
"""
