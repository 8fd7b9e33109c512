"""A Kubernetes API server with its etcd and nothing else: no controllers, no nodes.

KUBEBUILDER_ASSETS names the folder of both programs, as for controller-runtime's envtest; setup-envtest fetches them.
"""

import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.processes import end_with_tests

NAMESPACE = "models"


def programs() -> dict[str, str]:
    """Paths of kube-apiserver and etcd; those that are not there are left out."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    found = {name: shutil.which(name, path=folder) for name in ("etcd", "kube-apiserver")}
    return {name: path for name, path in found.items() if path}


class APIServer:
    """Its objects are in one namespace, whose pods may do least: Kubernetes' Pod Security Standard "restricted"."""

    def __init__(self, url: str, token: str, authority: ssl.SSLContext) -> None:
        self._url, self._token, self._authority = url, token, authority

    def create(self, one: dict[str, Any], *, dry_run: bool = True) -> tuple[int, Any]:
        """Status and answer. A dry run does all that creating does, admission included, but for storing the object."""
        group, kind = one["apiVersion"], one["kind"]
        plural = {"NetworkPolicy": "networkpolicies"}.get(kind, f"{kind.lower()}s")
        folder = "" if kind == "Namespace" else f"namespaces/{NAMESPACE}/"
        path = f"{'/api' if group == 'v1' else '/apis'}/{group}/{folder}{plural}?fieldValidation=Strict"
        return self._ask(path + ("&dryRun=All" if dry_run else ""), json.dumps(one).encode())

    def is_ready(self) -> bool:
        return self._ask("/readyz", None)[0] == 200

    def _ask(self, path: str, body: bytes | None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._authority) as answer:
                text, status = answer.read(), answer.status
        except urllib.error.HTTPError as refused:
            text, status = refused.read(), refused.code
        return status, json.loads(text) if text.startswith(b"{") else text.decode()


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@contextmanager
def running(folder: Path) -> Iterator[APIServer]:
    found, token = programs(), secrets.token_hex()
    store, peers, port = (_port() for _ in range(3))
    key, tokens = folder / "accounts.key", folder / "tokens.csv"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    tokens.write_text(f"{token},tests,tests,system:masters\n")
    etcd = [found["etcd"], f"--data-dir={folder}/etcd", f"--listen-client-urls=http://127.0.0.1:{store}"]
    etcd += [f"--advertise-client-urls=http://127.0.0.1:{store}", f"--listen-peer-urls=http://127.0.0.1:{peers}"]
    server = [found["kube-apiserver"], f"--etcd-servers=http://127.0.0.1:{store}", f"--cert-dir={folder}"]
    server += ["--bind-address=127.0.0.1", f"--secure-port={port}", f"--token-auth-file={tokens}"]
    server += [f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"]
    server += ["--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.0.0.0/24"]
    server += ["--authorization-mode=RBAC"]
    processes = []
    try:
        for command in (etcd, server):
            log = (folder / f"{Path(command[0]).name}.log").open("w")
            process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=end_with_tests)  # noqa: PLW1509
            processes.append(process)
        api = _ready(processes[-1], folder, f"https://127.0.0.1:{port}", token)
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
        assert api.create(namespace, dry_run=False)[0] == 201
        # Controllers make it in a cluster, before there are pods.
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        assert api.create(account, dry_run=False)[0] == 201
        yield api
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(timeout=60)


def _ready(process: subprocess.Popen, folder: Path, url: str, token: str) -> APIServer:
    certificate = folder / "apiserver.crt"
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        if certificate.exists():
            authority = ssl.create_default_context(cafile=certificate)
            authority.check_hostname = False  # the certificate is for the machine's name
            server = APIServer(url, token, authority)
            try:
                if server.is_ready():
                    return server
            except OSError:  # not yet
                pass
        time.sleep(0.5)
    raise AssertionError((folder / "kube-apiserver.log").read_text()[-3000:])
