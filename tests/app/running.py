"""A server over the tiny pipeline in a process of its own: python -m tests.app.running FOLDER.

Prints its address, logs everything at every level to stderr, and ends when its input is closed; then it prints which
files its folder holds. A line of its input is the most bytes that a file may have, which the system itself keeps.
"""

import json
import logging
import sys
from pathlib import Path

from tests.app.serving import tiny_server


def log_everything() -> None:
    for name in ("", *logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        logger.disabled = False
        logger.propagate = True
        logger.setLevel(1)


def main() -> None:
    folder = Path(sys.argv[1])
    logging.basicConfig(level=1, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    with tiny_server(folder) as server:
        log_everything()  # those of the web server too, which sets levels of its own
        sys.stdout.write(server.url + "\n")
        sys.stdout.flush()
        for line in sys.stdin:
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (int(line), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            sys.stdout.write("limited\n")
            sys.stdout.flush()
    store = folder / "store"
    names = sorted(path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file())
    sys.stdout.write(json.dumps(names) + "\n")


if __name__ == "__main__":
    main()
