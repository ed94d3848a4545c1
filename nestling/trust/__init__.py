"""Clients that lie: merges that bear some of them, and what one client may weigh at most."""
