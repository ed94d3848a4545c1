"""A fleet of real devices: what travels, who is there, the server's engine and the devices' worker.
Nothing here knows of a network: `nestling.fleet.flower` carries the bytes."""
