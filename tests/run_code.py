"""Runs code in a forked process: `python -m tests.run_code CODE WORD …`, with the words as argv."""

import sys

code, *sys.argv = sys.argv[1:]
exec(code, {"__name__": "__main__"})
