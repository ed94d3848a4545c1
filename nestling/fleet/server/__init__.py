"""The server's side of a fleet."""
