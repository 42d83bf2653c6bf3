"""Crash-proof LLM inference for datatrove."""
