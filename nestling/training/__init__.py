"""Client work: phases, objectives and the trainer, what a client keeps, and the server's own
distillation."""
