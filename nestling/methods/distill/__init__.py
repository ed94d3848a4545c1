"""Methods that fuse by distillation."""
