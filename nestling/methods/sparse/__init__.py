"""Methods whose clients train through masks of their own."""
