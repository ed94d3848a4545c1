"""The task as a Flower app: its clients and its server."""
