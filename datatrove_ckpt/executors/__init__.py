"""Executors: processes of this machine, jobs of Hugging Face or Kubernetes, arrays of Slurm."""
