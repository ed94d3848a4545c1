"""What travels between a server and its nodes, and how."""
