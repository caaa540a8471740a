"""`kvstore bench load`: the worker's engine beside other engines, under requests that arrive when they like and share prefixes.

`command` has the arguments and the list of engines, `prompts` makes the requests from a trace, `measure` lets each engine serve them,
`report` makes the tables. Each engine runs in a process of its own: `driver.py` is the process, `drive_<engine>.py` what it does there.
"""

from kvstore.bench.load.command import HELP, NAME, add_arguments, run

__all__ = ["HELP", "NAME", "add_arguments", "run"]
