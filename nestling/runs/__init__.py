"""A run: assembled, played round by round, accounted for, tested and written into its folder."""
