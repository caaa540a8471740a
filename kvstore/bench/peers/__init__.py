"""`kvstore bench peers`: this store beside others, on the same work.

`command` has the arguments and the list of peers, `measure` lets all have their turns, `report` makes the tables. A peer runs under the
Python of its own venv: `driver.py` is the process, `drive_<peer>.py` what it does there. They import nothing of kvstore, and kvstore
nothing of them.
"""

from kvstore.bench.peers.command import HELP, NAME, add_arguments, run

__all__ = ["HELP", "NAME", "add_arguments", "run"]
