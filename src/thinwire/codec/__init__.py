"""Two tensors to bytes and back. See docs/format.md for the bytes."""
