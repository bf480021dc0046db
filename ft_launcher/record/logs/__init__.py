"""The folder of a job, the ranks' output in it, and the files of NVIDIA's launcher."""
