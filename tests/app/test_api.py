"""The endpoints for programs, called with gradio_client as docs/app.md says."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from PIL import Image

from diffsieve.app.events.calls import owner_of
from diffsieve.app.store import Bounds
from tests.app.conftest import SMALL
from tests.app.serving import Tiny, tiny_server
from tests.app.test_server import request

ARGUMENTS = vars(SMALL)


@pytest.fixture
def client(server, tmp_path):
    made = Client(server.url, verbose=False, download_files=str(tmp_path / "downloads"))
    yield made
    made.close()


def test_the_endpoints_are_these(client):
    assert sorted(client.view_api(return_format="dict")["named_endpoints"]) == [
        "/attention",
        "/cancel",
        "/compare",
        "/masks",
        "/runs",
        "/sweep",
    ]


def test_compare_by_name_gives_files_and_the_report(client, server):
    dense, sparse, both, answer = client.predict(**ARGUMENTS, api_name="/compare")
    for path in (dense, sparse, both):
        assert Path(path).read_bytes()[4:8] == b"ftyp"
    assert answer["report"]["clips"][0]["metrics"]["psnr"]["mean"] < 100
    assert [run.id for run in server.handlers.runs() if not run.example] == [answer["id"]]

    masks = client.predict(answer["id"], api_name="/masks")
    layer, steps = next(iter(masks["layers"].items()))
    mask, attended, counts = client.predict(answer["id"], layer, steps[-1], 1, 0, 2, 3, api_name="/attention")
    for path in (mask, attended):
        with Image.open(path) as image:
            assert min(image.size) > 100
    assert counts == {"attended": 24, "tokens": 48}


def test_defaults_may_be_left_out(client):
    with pytest.raises(AppError, match="frames x width x height must be at most 24,000,000 pixels"):
        client.predict(frames=129, width=1280, height=1280, api_name="/compare")


def test_sweep(client):
    answer = client.predict(**ARGUMENTS, values="25, 75", api_name="/sweep")
    assert [run["report"]["settings"]["sparsity"] for run in answer["runs"]] == [0.25, 0.75]


def test_runs_list_the_examples_too(client):
    assert [run["id"] for run in client.predict(api_name="/runs")["runs"] if run["example"]] == ["example-1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "/etc/passwd"}, "model must be one of tiny"),
        ({"prompt": "<script>alert(1)</script>" * 50}, "prompt must have at most 1,000 characters"),
        ({"method": "<img src=x onerror=alert(1)>"}, "method must be one of .* got &#x27;&lt;img"),
        ({"steps": 10**30}, "steps must be a whole number from 1 to 100"),
        ({"steps": "4"}, "steps must be a whole number"),
        ({"width": [32]}, "width must be a whole number"),
        ({"seed": None}, "seed must be a whole number"),
        ({"sparsity": 1e300}, "sparsity must be a number from 0 to 0.99, got 1e\\+300"),
    ],
)
def test_wrong_values_end_in_one_sentence(client, changes, message):
    with pytest.raises(Exception, match=message) as raised:
        client.predict(**ARGUMENTS | changes, api_name="/compare")
    assert "Traceback" not in str(raised.value)
    assert str(Path.cwd()) not in str(raised.value)


@pytest.mark.parametrize(
    "place",
    [("../../../etc/passwd", "x", 0, 0, 0, 0, 0), ("example-1", "/etc/passwd", 2, 0, 0, 0, 0),
     ("example-1", "transformer.blocks.1", -1, 0, 0, 0, 0), ("example-1", "transformer.blocks.1", 2, 99, 0, 0, 0),
     ("example-1", "transformer.blocks.1", 2, 0, 10**18, 0, 0), (None, None, None, None, None, None, None)],
)  # fmt: skip
def test_wrong_places_end_in_one_sentence(client, place):
    with pytest.raises(AppError, match=r"must be|not there"):
        client.predict(*place, api_name="/attention")


class Slow(Tiny):
    """A tiny model whose every forward waits until it may go on."""

    def __init__(self):
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.failing = False

    def __call__(self, model, *, device=None, dtype=None):
        pipe = super().__call__(model)
        pipe.transformer.register_forward_pre_hook(self._wait)
        return pipe

    def _wait(self, *_arguments):
        self.reached.set()
        if self.failing:
            raise RuntimeError("the model broke at /usr/secret")
        assert self.go_on.wait(60)


@pytest.fixture
def slow(tmp_path):
    load = Slow()
    with tiny_server(tmp_path, load=load, queue=4) as running:
        yield running, load
        load.go_on.set()


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def test_cancel_ends_the_run_of_its_session_and_frees_the_queue(slow):
    server, load = slow
    first, second = (Client(server.url, verbose=False) for _ in range(2))
    running = first.submit(**ARGUMENTS, api_name="/compare")
    assert load.reached.wait(30)
    assert second.predict(api_name="/cancel") == 0, "another session must not cancel it"
    waiting = second.submit(**ARGUMENTS | {"seed": 1}, api_name="/compare")
    assert first.predict(api_name="/cancel") == 1
    load.go_on.set()
    with pytest.raises(AppError, match="cancelled; nothing of this run was kept"):
        running.result(timeout=120)
    assert waiting.result(timeout=120)[3]["report"]["seed"] == [1]
    assert [run.report["seed"] for run in server.handlers.runs()] == [[1]]


def test_programs_without_a_session_do_not_cancel_one_another(slow):
    """A bare HTTP request is nobody else's; one that names its session may cancel what that session runs."""
    server, load = slow
    headers = {"Content-Type": "application/json"}

    def post(route, data, **more):
        body = json.dumps({"data": data, **more}).encode()
        status, _, text = request(server.url, f"/gradio_api/{route}", data=body, headers=headers)
        assert status == 200, text
        return json.loads(text)

    def last(name, event):
        stream = request(server.url, f"/gradio_api/call/{name}/{event}")[2].decode()
        return stream.strip().split("\n\n")[-1]

    post("call/compare", list(ARGUMENTS.values()))
    assert load.reached.wait(30)
    named = post("call/compare", list(ARGUMENTS.values()), session_hash="mine")["event_id"]
    assert post("run/cancel", [])["data"] == [0]
    assert post("run/cancel", [], session_hash="nobody")["data"] == [0]
    assert "[0]" in last("cancel", post("call/cancel", [])["event_id"])
    load.go_on.set()
    assert "complete" in last("compare", named)
    until(lambda: not server.handlers.jobs.busy)
    assert len(server.handlers.runs()) == 1

    load.go_on.clear()
    post("call/compare", list((ARGUMENTS | {"seed": 1}).values()), session_hash="mine")
    until(lambda: server.handlers.jobs.busy)
    assert post("run/cancel", [], session_hash="mine")["data"] == [1]
    load.go_on.set()


def test_a_request_without_a_session_is_an_owner_of_its_own():
    owners = {owner_of(asked) for asked in (None, None, SimpleNamespace(session_hash=None))}
    assert len(owners) == 3
    assert owner_of(SimpleNamespace(session_hash="mine")) == "mine"


def test_one_request_runs_and_one_too_many_is_refused(slow):
    server, load = slow
    client = Client(server.url, verbose=False)
    jobs = [client.submit(**ARGUMENTS, api_name="/compare")]
    assert load.reached.wait(30)
    for seed in range(1, 5):
        jobs.append(client.submit(**ARGUMENTS | {"seed": seed}, api_name="/compare"))
    queued = server.blocks._queue
    until(lambda: len(queued) == 4)
    with pytest.raises(Exception, match=r"[Qq]ueue is full|Too many|503|full"):
        client.predict(**ARGUMENTS | {"seed": 9}, api_name="/compare")
    load.go_on.set()
    assert sorted(job.result(timeout=120)[3]["report"]["seed"] for job in jobs) == [[0], [1], [2], [3], [4]]


def test_a_client_that_goes_away_frees_the_model(slow):
    server, load = slow
    client = Client(server.url, verbose=False)
    client.submit(**ARGUMENTS, api_name="/compare")
    assert load.reached.wait(30)
    client.close()
    load.go_on.set()
    until(lambda: not server.handlers.jobs.busy)
    other = Client(server.url, verbose=False)
    assert other.predict(**ARGUMENTS | {"seed": 3}, api_name="/compare")[3]["report"]["seed"] == [3]


def test_a_model_that_breaks_leaves_the_server_and_earlier_runs(slow):
    server, load = slow
    load.go_on.set()
    client = Client(server.url, verbose=False)
    kept = client.predict(**ARGUMENTS, api_name="/compare")[3]["id"]
    load.failing = True
    with pytest.raises(AppError, match=r"the run failed with RuntimeError; entry [0-9a-f]{8} of the log") as raised:
        client.predict(**ARGUMENTS | {"seed": 1}, api_name="/compare")
    assert "/usr" not in str(raised.value)
    load.failing = False
    assert client.predict(**ARGUMENTS | {"seed": 2}, api_name="/compare")[3]["id"]
    assert kept in [run["id"] for run in client.predict(api_name="/runs")["runs"]]


def test_fifty_clients_at_once_all_get_their_result(tmp_path):
    with tiny_server(tmp_path) as running:
        results, errors = {}, []

        def work(number):
            try:
                # Clients and server share this process: a slow answer is not a lost one.
                client = Client(running.url, verbose=False, httpx_kwargs={"timeout": 60})
                # Ten different requests: the others find them finished.
                answer = client.predict(**ARGUMENTS | {"seed": number % 10}, api_name="/compare")
                results[number] = answer[3]["report"]["seed"]
                client.close()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(180)
        assert errors == []
        assert results == {number: [number % 10] for number in range(50)}
        assert len(running.handlers.runs()) == 10


def test_a_full_folder_drops_the_oldest_and_goes_on(tmp_path):
    with tiny_server(tmp_path, bounds=Bounds(size=900_000)) as running:
        client = Client(running.url, verbose=False)
        ids = [client.predict(**ARGUMENTS | {"seed": seed}, api_name="/compare")[3]["id"] for seed in range(4)]
        left = [run["id"] for run in client.predict(api_name="/runs")["runs"]]
        assert ids[-1] in left
        assert ids[0] not in left
