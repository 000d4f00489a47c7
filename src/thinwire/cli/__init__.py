"""The command ``thinwire``: arguments in, a table or JSON out; everything else is the library's.

Files: ``app`` (the commands together), one file per command, ``failures`` (errors to exit codes),
``output`` (tables and JSON), ``progress`` (bars), ``logs`` (what goes to stderr, and metrics),
``signals`` (SIGTERM), ``versions`` (a version as text and JSON),
``values`` (a tensor's first values), ``step_counts`` (histograms of ``inspect``).
"""

from thinwire.cli.app import main

__all__ = ["main"]
