"""The boards: what each has, and their emulators."""
