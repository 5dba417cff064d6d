"""The server as a process of its own: what its log never holds, and a system that refuses to write."""

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from diffsieve.app.server import PASSWORD, USER
from tests.app.conftest import SMALL
from tests.app.test_server import request
from tests.small_disk import MOUNT, NO_MOUNTS, has_mounts

ROOT = Path(__file__).parents[2]
ARGUMENTS = vars(SMALL)


@contextmanager
def process(folder, *before, **environment):
    """Start a server; give its address, a function that limits the bytes of its files, and one that ends it.

    The last one returns the names of its files and what it logged.
    """
    command = [*before, sys.executable, "-m", "tests.app.running", str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as running:
        errors = []
        reader = threading.Thread(target=lambda: errors.append(running.stderr.read()))
        reader.start()
        url = running.stdout.readline().strip()

        def limit(most):
            running.stdin.write(f"{most}\n")
            running.stdin.flush()
            while running.stdout.readline() not in ("limited\n", ""):  # the web server logs each request there
                pass

        def end():
            if not running.stdin.closed:
                running.stdin.close()
            rest = running.stdout.read()
            reader.join(60)
            assert running.wait(60) == 0, errors
            *lines, files = rest.splitlines()
            return json.loads(files), "\n".join([*lines, *errors])

        try:
            assert url.startswith("http://"), "it did not start"
            yield url, limit, end
        finally:
            if running.poll() is None:
                running.kill()


def test_the_log_holds_no_password_at_any_level(tmp_path):
    name, password, wrong = "someone-here", "pass-word-8472", "wrong-word-1935"
    with process(tmp_path, **{USER: name, PASSWORD: password}) as (url, _, end):
        for given in (wrong, password):
            status, headers, _ = request(url, "/login", data=f"username={name}&password={given}".encode())
            assert status == (200 if given == password else 400)
        cookie = headers["set-cookie"].split(";")[0]
        assert request(url, "/config", headers={"Cookie": cookie})[0] == 200
        assert request(url, "/config", headers={"Cookie": cookie[:-1] + "_"})[0] == 401
        client = Client(url, auth=(name, password), verbose=False)
        with pytest.raises(AppError, match="steps must be"):
            client.predict(**ARGUMENTS | {"steps": 0}, api_name="/compare")
        assert client.predict(**ARGUMENTS, api_name="/compare")[3]["id"]
        client.close()
        with pytest.raises(Exception, match=r"credentials|login"):
            Client(url, auth=(name, wrong), verbose=False)
        _, written = end()
    assert re.search("^DEBUG ", written, re.M), "the test must see the lowest levels"
    assert written.count('"POST /login HTTP/1.1" 400') >= 2, "and the failed logins"
    for secret in (password, wrong, name, cookie.split("=", 1)[1].strip('"')):
        assert secret not in written


def refused(client, message, **changes):
    with pytest.raises(AppError, match=message) as raised:
        client.predict(**ARGUMENTS | changes, api_name="/compare")
    assert str(Path.cwd()) not in str(raised.value)
    return str(raised.value)


@pytest.mark.skipif(os.name != "posix", reason="needs a limit on the size of files")
def test_a_system_that_takes_no_large_file_is_told_and_leaves_no_half_of_a_run(tmp_path):
    with process(tmp_path) as (url, limit, end):
        client = Client(url, verbose=False)
        told = []
        # Of all that a run writes, too large is first the dense clip's frames, then a clip by ffmpeg, then the report.
        for seed, most in enumerate((50_000, 150_000, 300_000)):
            limit(most)
            told.append(refused(client, "the server may not write a file of this size", seed=seed))
            assert client.predict(api_name="/runs") == {"runs": []}
        limit(10_000_000)
        made = client.predict(**ARGUMENTS, api_name="/compare")[3]["id"]
        client.close()
        files, log = end()
    assert nothing_half(files, made)
    assert all(text.split("entry ")[1][:8] in log for text in told)


def nothing_half(files, run):
    left = [name for name in files if not name.startswith((".diffsieve", "dense/", f"runs/{run}/"))]
    return left == [] and not any(name.endswith("part") for name in files)


@pytest.mark.skipif(not has_mounts(), reason=NO_MOUNTS)
def test_a_full_disk_is_told_and_loses_no_finished_run(tmp_path):
    """The folder of the server lies on a file system that holds one run, and not all of a second one."""
    with process(tmp_path, *MOUNT, str(tmp_path), "1000k") as (url, _, end):
        client = Client(url, verbose=False)
        kept = client.predict(**ARGUMENTS, api_name="/compare")[3]["id"]
        # The first one fails at a clip and leaves its dense frames, for which the second one then has no place.
        for seed in (1, 2):
            told = refused(client, "the disk of the server is full; finished runs are still there", seed=seed)
        assert [run["id"] for run in client.predict(api_name="/runs")["runs"]] == [kept]
        assert client.predict(**ARGUMENTS, api_name="/compare")[3]["id"] == kept
        assert client.predict(kept, "transformer.blocks.1", 1, 0, 0, 2, 3, api_name="/attention")[2]["attended"] > 0
        client.close()
        files, log = end()
    assert nothing_half(files, kept)
    assert told.split("entry ")[1][:8] in log
