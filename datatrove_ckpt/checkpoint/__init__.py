"""The checkpoint."""
