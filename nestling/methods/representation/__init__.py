"""Methods that exchange what networks make of data, not the networks alone."""
