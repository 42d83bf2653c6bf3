"""The user's code: its identity, and its transport to other processes."""
