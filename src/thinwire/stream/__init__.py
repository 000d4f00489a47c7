"""Decisions about a stream: no I/O and no clock. Keys, manifests, signatures, routes, retention."""
