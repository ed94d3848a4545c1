"""A node's side of a fleet: one device, or a gateway for many."""
