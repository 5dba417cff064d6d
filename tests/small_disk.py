"""A file system of a few kilobytes, for a disk that is really full; a command sees it, and nobody else."""

import subprocess
import tempfile

# A file system in memory for the command alone: a folder and a size, then what to run.
MOUNT = ("unshare", "--mount", "--map-root-user", "sh", "-c",
         'mount -t tmpfs -o size="$2" tmpfs "$1" && shift 2 && exec "$@"', "sh")  # fmt: skip
NO_MOUNTS = "needs a file system of a few kilobytes: unshare and mount are not allowed"


def has_mounts():
    """Whether a process may have a file system of its own: root, or anybody where the system allows it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return subprocess.run([*MOUNT, folder, "100k", "true"], capture_output=True).returncode == 0
        except OSError:
            return False
