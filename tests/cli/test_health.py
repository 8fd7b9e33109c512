"""``vllm-kvmerge health`` finds servers by themselves, whatever their port, and speaks TLS with those that do."""

import http.server
import ssl
import subprocess
import sys
import tempfile
import threading

import pytest

from vllm_kvmerge.cli import health, main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class Health(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=[False, True], ids=["http", "https"])
def server(request, tmp_path):
    """Announced as one that listens everywhere."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
    if request.param:
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=elsewhere"]
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    health.announce("0.0.0.0", server.server_port, is_tls=request.param)
    yield server
    server.shutdown()
    server.server_close()


def test_a_server_is_found(server, monkeypatch, capsys):
    assert main(["health"]) == 0
    assert capsys.readouterr().out == f"healthy: 127.0.0.1:{server.server_port}\n"
    monkeypatch.setattr(Health, "status", 503)
    assert main(["health"]) == 1
    assert f"no answer from 127.0.0.1:{server.server_port}" in capsys.readouterr().err


def test_no_server(capsys, folder):
    assert main(["health"]) == 1
    # One that was killed, and one that does not answer any more.
    (folder / "vllm-kvmerge-server-4194999.json").write_text('["127.0.0.1", 1, false]')
    assert main(["health"]) == 1
    assert capsys.readouterr().err.count("no server") == 2
    health.announce(None, 1, is_tls=False)
    assert main(["health"]) == 1
    assert "no answer from 127.0.0.1:1" in capsys.readouterr().err


def test_a_process_takes_its_file_with_it_and_replaces_that_of_an_earlier_one(folder):
    health.announce(None, 1, is_tls=False)
    health.announce(None, 2, is_tls=False)
    (file,) = folder.iterdir()
    assert file.read_text() == '["127.0.0.1", 2, false]' and file.stat().st_mode & 0o777 == 0o600
    code = "import tempfile; from vllm_kvmerge.cli import health; health.announce(None, 1, is_tls=False)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"TMPDIR": str(folder), "PYTHONPATH": "."})
    assert list(folder.iterdir()) == [file]
