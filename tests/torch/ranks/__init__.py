"""Publishing from jobs of several ranks: real processes, real gloo, real signals."""
