"""Tests of thinwire.bench."""
