"""What keeps a fleet well: certificates, health, logs, processes."""
