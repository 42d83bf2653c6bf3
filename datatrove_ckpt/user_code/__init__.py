"""Which code of the user made the answers, and how it travels to other processes."""
