"""The command ``thinwire``: arguments in, a table or JSON out; everything else is the library's.

Files: ``app`` (the commands together), one file per command, ``failures`` (errors to exit codes),
``output`` (tables and JSON), ``progress`` (bars), ``step_counts`` (histograms of ``inspect``).
"""

from thinwire.cli.app import main

__all__ = ["main"]
