"""Methods whose clients train factors of the weights, or a network that makes them."""
