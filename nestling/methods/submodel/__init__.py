"""Methods whose clients train a part of one network, cut in width, in depth or in both."""
