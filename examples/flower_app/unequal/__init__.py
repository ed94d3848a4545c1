"""A Flower app of unequal devices."""
