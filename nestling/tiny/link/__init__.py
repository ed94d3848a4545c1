"""The link between a gateway and its boards: frames, lines, sessions, and the gateway itself."""
