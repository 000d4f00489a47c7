"""Other systems' delta formats, read and written without those systems."""
