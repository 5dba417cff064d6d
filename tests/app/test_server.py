"""The server from outside: files and routes that are refused, addresses that need a password, what browsers get."""

import json
import os
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import pytest

from diffsieve.app import server as module
from diffsieve.app.models import Shelf, offered_models
from diffsieve.app.server import PASSWORD, USER, ServerConfig, credentials, is_local, serve
from diffsieve.errors import UserInputError
from tests.app.conftest import SMALL
from tests.app.serving import Tiny, tiny_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("server")
    (root / "secret.txt").write_text("hidden words")
    with tiny_server(root) as running:
        yield running


def answer(server, path, *, data=None, headers=None):
    """Return status, headers and body of a request."""
    return request(server.url, path, data=data, headers=headers)


def request(url, path, *, data=None, headers=None):
    asked = HttpRequest(url.rstrip("/") + path, data=data, headers=headers or {})
    try:
        with urlopen(asked, timeout=20) as response:
            return response.status, response.headers, response.read()
    except HTTPError as error:
        return error.code, error.headers, error.read()


def test_the_page_is_there_with_its_headers(server):
    status, headers, body = answer(server, "/")
    assert status == 200
    assert b"diffsieve-player" in body
    assert "default-src 'self'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "{root}/secret.txt",
        "{store}/.diffsieve",
        "{served}/../secret.txt",
        "{served}/runs/../../../../etc/passwd",
        "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        str(Path(module.__file__)),
        str(Path.cwd() / "pyproject.toml"),
        str(Path.cwd() / "README.md"),
    ],
)
def test_the_file_route_refuses_what_was_not_published(server, path):
    store = server.handlers.store
    names = {"root": store.root.parent, "store": store.root, "served": store.served}
    status, _, body = answer(server, "/gradio_api/file=" + path.format(**names))
    assert status in (403, 404)
    assert b"hidden words" not in body
    assert b"root:" not in body


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/upload",
        "/upload",
        "/gradio_api/proxy=http://example.com/",
        "/gradio_api/file=http://127.0.0.1:1/",
        "/gradio_api/file=https://example.com/",
        "/gradio_api/stream/x",
        "/gradio_api/deep_link",
        "/gradio_api/component_server/",
    ],
)
def test_routes_that_the_page_does_not_need_are_closed(server, path):
    assert answer(server, path)[0] == 403
    assert answer(server, path, data=b"x")[0] == 403


def test_nothing_can_be_uploaded(server):
    body = b'--b\r\nContent-Disposition: form-data; name="files"; filename="x.py"\r\n\r\nprint()\r\n--b--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    status, _, _ = answer(server, "/gradio_api/upload", data=body, headers=headers)
    assert status == 403
    assert not list(server.handlers.store.served.rglob("x.py"))


@pytest.mark.parametrize("headers", [{}, {"Transfer-Encoding": "chunked"}, {"Transfer-Encoding": "Chunked"}])
def test_a_large_request_is_refused(server, headers):
    body = b"[" + b"1," * module.MAX_BODY + b"1]"
    data = iter([body]) if headers else body
    try:
        status, _, _ = answer(server, "/gradio_api/queue/join", data=data, headers=headers)
    except OSError:  # the server closes the connection before all is sent
        status = 413
    assert status == 413
    assert answer(server, "/")[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:7", 200), ("127.0.0.1", 200), ("[::1]:7", 200), ("a.example:7", 403), ("127.0.0.1.a.example", 403)],
)
def test_a_foreign_name_for_this_machine_is_refused(server, host, status):
    assert answer(server, "/", headers={"Host": host})[0] == status


def call(server, name, data):
    """Call an endpoint without a client; return the last event and its data."""
    headers = {"Content-Type": "application/json"}
    status, _, body = answer(
        server, f"/gradio_api/call/{name}", data=json.dumps({"data": data}).encode(), headers=headers
    )
    if status != 200:
        return str(status), body
    event = json.loads(body)["event_id"]
    _, _, stream = answer(server, f"/gradio_api/call/{name}/{event}")
    *_, last = (part for part in stream.decode().split("\n\n") if part.strip())
    lines = dict(line.split(": ", 1) for line in last.splitlines())
    return lines["event"], json.loads(lines["data"])


def test_a_post_with_numbers_out_of_range_is_refused(server):
    values = list(vars(SMALL).values())
    for place, value, message in ((7, 10**9, "steps must be"), (8, 1e300, "frames must be"), (5, 7, "sparsity must be"),
                                  (0, "../../etc/passwd", "model must be one of tiny"), (9, "wide", "width must be"),
                                  (1, {"path": "/etc/passwd"}, "prompt must be a text")):  # fmt: skip
        changed = [*values[:place], value, *values[place + 1 :]]
        event, data = call(server, "compare", changed)
        assert event == "error"
        assert message in data["error"]
        assert "Traceback" not in json.dumps(data)


def test_events_of_the_page_validate_too(server):
    """The page's own events are hidden from the list of endpoints, but anybody can send to their numbers."""
    config = json.loads(answer(server, "/config")[2])
    values = list(vars(SMALL).values())
    values[7] = 10**9
    hidden = [
        f["id"] for f in config["dependencies"] if f["api_visibility"] == "private" and len(f["inputs"]) == len(values)
    ]
    assert hidden
    for number in hidden:
        body = json.dumps({"data": values, "fn_index": number, "session_hash": f"s{number}"}).encode()
        status, _, _ = answer(server, "/gradio_api/queue/join", data=body, headers={"Content-Type": "application/json"})
        assert status == 200
        _, _, stream = answer(server, f"/gradio_api/queue/data?session_hash=s{number}")
        assert "steps must be a whole number from 1 to" in stream.decode()
    assert server.handlers.runs() == []


def test_the_page_asks_for_nothing_outside(server):
    _, _, page = answer(server, "/")
    text = page.decode()
    assert "fonts.googleapis" not in text
    assert "cdnjs" not in text


def test_the_configuration_shows_no_path_of_the_server(server):
    text = answer(server, "/config")[2].decode() + answer(server, "/gradio_api/info")[2].decode()
    assert str(server.handlers.store.root) not in text
    assert str(Path.home()) not in text


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("10.0.0.5", False),
     ("example.com", False), ("", False)],
)  # fmt: skip
def test_which_addresses_are_local(host, local):
    assert is_local(host) is local


def test_an_open_address_needs_credentials(monkeypatch):
    monkeypatch.delenv(USER, raising=False)
    monkeypatch.delenv(PASSWORD, raising=False)
    assert credentials("127.0.0.1", share=False) is None
    for host, share in (("0.0.0.0", False), ("", False), ("127.0.0.1", True)):
        with pytest.raises(UserInputError, match=f"can be reached by others: set {USER} and {PASSWORD}"):
            credentials(host, share=share)
    monkeypatch.setenv(USER, "me")
    with pytest.raises(UserInputError, match="must be set together"):
        credentials("127.0.0.1", share=False)
    monkeypatch.setenv(PASSWORD, "short")
    with pytest.raises(UserInputError, match="at least 8 characters, got 5") as raised:
        credentials("0.0.0.0", share=False)
    assert "short" not in str(raised.value)
    monkeypatch.setenv(PASSWORD, "long enough")
    assert credentials("0.0.0.0", share=False) == ("me", "long enough")


def test_with_a_password_nothing_is_told_to_strangers(tmp_path, monkeypatch):
    monkeypatch.setenv(USER, "me")
    monkeypatch.setenv(PASSWORD, "long enough")
    with tiny_server(tmp_path) as running:
        for path in ("/config", "/gradio_api/info", f"/gradio_api/file={running.handlers.store.served}/runs/x"):
            assert answer(running, path)[0] == 401
        for path in ("/gradio_api/call/runs", "/gradio_api/queue/join"):
            body, headers = b'{"data": [], "session_hash": "x"}', {"Content-Type": "application/json"}
            assert answer(running, path, data=body, headers=headers)[0] == 401
        assert b"long enough" not in answer(running, "/")[2]
        wrong = answer(running, "/login", data=b"username=me&password=wrong")
        assert wrong[0] == 400
        right = answer(running, "/login", data=b"username=me&password=long+enough")
        assert right[0] == 200
        cookie = right[1]["set-cookie"].split(";")[0]
        # A proxy in front may give the server any name.
        assert answer(running, "/config", headers={"Cookie": cookie, "Host": "a.example"})[0] == 200


def test_a_taken_port_is_one_clear_error(server, tmp_path):
    port = int(server.url.rsplit(":", 1)[1].strip("/"))
    with pytest.raises(UserInputError, match=f"port must be free, got {port}"), tiny_server(tmp_path, port=port):
        pass
    assert "GRADIO_TEMP_DIR" in os.environ


def test_without_gradio_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gradio", None)
    with (
        pytest.raises(UserInputError, match=r'pip install "diffsieve\[app\]"'),
        serve(ServerConfig(folder=tmp_path / "store"), shelf=Shelf({"tiny": "tiny"}, load=Tiny())),
    ):
        pass


def test_the_models_are_fixed_at_the_start(tmp_path):
    assert next(iter(offered_models())) == "mini-wan"
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "model_index.json").write_text("{}")
    assert offered_models([str(folder), "owner/name"])["my-model"] == str(folder)
    with pytest.raises(UserInputError, match="model must be"):
        offered_models(["no such thing"])
    other = tmp_path / "other" / "my-model"
    other.mkdir(parents=True)
    (other / "model_index.json").write_text("{}")
    with pytest.raises(UserInputError, match="two called my-model"):
        offered_models([str(folder), str(other)])
