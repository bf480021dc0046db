"""NVIDIA's classes for local checkpoints, for Megatron-LM and Megatron Bridge: each rank saves its part on its node.

Programs find these modules as `nvidia_resiliency_ext.checkpointing.local...` and `...checkpointing.utils`
(`nvrx_alias/finder.py` has the names). Names and arguments of what programs call are the peer's. The files are ours:

- `part_format.py`: the names of a part's file, and what stands at its end. `part_files.py` writes and reads one.
- `parts_folder.py`: where this rank's parts lie: in the launcher's folder in memory, else in the user's own folder.
- `agreement.py`: which save all ranks can put together, and whether one more fits.
- `base_manager.py`: how ranks save and load together; `local_manager.py`: with files.
- `state_dicts.py`, `async_request.py`, `group_utils.py`, `strategies.py`, `debug.py`: the peer's other names.

A save is drawn a *token* by rank 0, which each of its parts carries. Parts of two saves of one iteration are never
loaded together. A part is a pickle: only files of this user are read, after their checksum is verified, and never what
another node wrote. So parts are not replicated.
"""
