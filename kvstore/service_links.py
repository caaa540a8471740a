"""What Kubernetes sets in every pod's environment for each Service: of one called `kvstore`, names that look like the daemon's settings."""

from __future__ import annotations

import re
from collections.abc import Iterable

_HOST = "_SERVICE_HOST"  # every Service has it, and no setting ends so
_LINK = re.compile(r"_SERVICE_HOST|_SERVICE_PORT(_[A-Z0-9_]+)?|_PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?")


def service_links(names: Iterable[str]) -> frozenset[str]:
    """Those of the variables that Kubernetes set for a Service; a name alone, without its Service's others, is none of them."""
    given = list(names)
    services = [name.removesuffix(_HOST) for name in given if name.endswith(_HOST)]
    return frozenset(name for name in given for each in services if name.startswith(each) and _LINK.fullmatch(name, len(each)))
