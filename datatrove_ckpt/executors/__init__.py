"""Executors: processes of this machine, jobs of Hugging Face, job arrays of Slurm."""
