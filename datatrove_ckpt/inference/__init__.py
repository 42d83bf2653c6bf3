"""Servers and client: network only, no disk but the server log, no datatrove."""
