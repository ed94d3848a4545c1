"""Clients that lie: merges that bear some of them, and attacks to try that with."""
