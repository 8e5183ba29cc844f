"""Does a router, balance, dispatcher, fusion or schedule keep its protocol? Your own, or a shipped
one.

python scripts/check_part.py my_pkg.MyRouter                        in the folder with my_pkg
python scripts/check_part.py my_pkg.MyRouter top_k=4 temperature=2  arguments, key=value
python scripts/check_part.py sidestream.overlap.two_batch.TwoBatchOverlap

Prints a line per property. Dispatchers and schedules are tried on two ranks of this machine. The
exit code is 0 if all hold, 1 if one does not, 2 if the class cannot be found or built. The first
step of a run looks at the same things, but only at what comes its way.
"""

import os
import sys
from typing import NoReturn

from sidestream.commands import shared
from sidestream.config.errors import ConfigError
from sidestream.config.place import CONF
from sidestream.conformance.command import (
    KINDS,
    arguments_for,
    find_class,
    kind_of,
    maker,
    needs_ranks,
    tried,
)
from sidestream.measure.ranks import Failed, run_ranks


def main(argv: list[str] | None = None) -> int:
    parser = shared.parser(__doc__, whole=True, allow_abbrev=False)
    parser.add_argument("part", help="dotted name of the class")
    parser.add_argument("override", nargs="*", help="arguments of the class, key=value")
    parser.add_argument("--kind", choices=KINDS, help="the group it belongs to, if its arguments do not tell")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=2, help="CPU ranks (default 2)")
    options = parser.parse_intermixed_args(argv)
    sys.path.insert(0, os.getcwd())
    try:
        cls = find_class(options.part)
        kind = options.kind or kind_of(cls)
        arguments = arguments_for(cls, kind, options.override, conf=CONF)
        make = maker(cls, arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.part} as {kind}", flush=True)
    if not needs_ranks(cls, kind):
        found = []
        for verdict in tried(cls, kind, make):
            print(verdict.line(), flush=True)
            found.append(verdict.problem)
    else:
        # What lives on one rank only is tried there.
        ranks = 1 if options.part.endswith("LocalDispatcher") else options.ranks
        job = {
            "target": options.part,
            "kind": kind,
            "arguments": arguments,
            "malloc": "default",
            "timeout_s": 60,
        }
        try:
            records = run_ranks(job, world_size=ranks, module="sidestream.conformance.command")["records"]
        except Failed as error:
            print(error, flush=True)
            print("failed: a rank ended, and the others cannot go on without it")
            return 1
        found = [record["problem"] for record in records]
    failed = sum(problem is not None for problem in found)
    print(f"{len(found) - failed} of {len(found)} properties hold")
    return 1 if failed else 0


def run() -> NoReturn:
    shared.run(main)
