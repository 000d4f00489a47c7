"""Where thinwire meets trainers and inference engines: one file for each, imported by name only."""
