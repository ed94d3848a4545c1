"""The Flower app that `nestling serve` runs: the run itself on the server, and on devices a relay
to their resident worker.

Flower packs this folder and takes its modules by their bare names.
"""
