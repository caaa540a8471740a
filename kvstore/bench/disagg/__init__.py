"""`kvstore bench disagg`: one worker for prompts and one for texts, beside two workers for both, under the same mixed load.

`command` has the arguments, `fleet` the processes, `asking` the requests as a client sends and hears them, `report` the table.
"""

from kvstore.bench.disagg.command import HELP, NAME, add_arguments, run

__all__ = ["HELP", "NAME", "add_arguments", "run"]
