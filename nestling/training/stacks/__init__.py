"""Clients that do the same work, trained as one."""
