"""A certificate is checked before anything starts; HAProxy's configuration is changed or refused, never left plain."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import httpx
import pytest

from deploy.settings import make_settings
from deploy.tls import tls_files
from workers.engine.errors import InvalidRequest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "haproxy.sh"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with self-signed certificates: a and b are good, ``old`` has expired; ``locked.key`` has a password."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("a", "b"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
             "-keyout", f"{name}.key", "-out", f"{name}.crt"],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
    make_old = ["openssl", "x509", "-in", "a.crt", "-signkey", "a.key", "-days", "-1", "-out", "old.crt"]
    lock = ["openssl", "pkey", "-in", "a.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key"]
    for command in (make_old, lock):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def test_a_key_and_its_certificate_become_one_private_file(pem: Path, tmp_path: Path) -> None:
    files = tls_files(make_settings(ssl_keyfile=pem / "a.key", ssl_certfile=pem / "a.crt"))

    assert files is not None
    files.write_bundle(tmp_path / "bundle.pem")
    assert (tmp_path / "bundle.pem").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "bundle.pem").read_text().count("-----BEGIN") == 2
    assert tls_files(make_settings()) is None


@pytest.mark.parametrize(
    ("key", "certificate", "says"),
    [
        ("a.key", None, "--ssl-keyfile needs --ssl-certfile"),
        (None, "a.crt", "--ssl-certfile needs --ssl-keyfile"),
        ("none", "a.crt", r"--ssl-keyfile .*none cannot be read \(No such file"),
        ("a.key", "b.crt", "--ssl-certfile .*b.crt and --ssl-keyfile .*a.key are no certificate and its key"),
        ("a.crt", "a.key", "no certificate and its key"),
        ("a.key", ".", r"--ssl-certfile .* cannot be read \(Is a directory\)"),
        ("locked.key", "a.crt", "has a password"),
        ("a.key", "old.crt", "certificate has expired"),
    ],
)
def test_what_makes_no_certificate_is_refused(
    pem: Path, key: str | None, certificate: str | None, says: str
) -> None:
    settings = make_settings(
        ssl_keyfile=pem / key if key else None, ssl_certfile=pem / certificate if certificate else None
    )

    with pytest.raises(InvalidRequest, match=says):
        tls_files(settings)


def start_haproxy(folder: Path, config: str) -> subprocess.CompletedProcess[str]:
    path = folder / "haproxy.cfg"
    path.write_text(config)
    environment = {
        **os.environ, "SHOAL_HOST": "127.0.0.1", "SHOAL_HAPROXY_BINARY": "/bin/true",
        "SHOAL_TLS_BUNDLE": "/folder/tls.pem", "SHOAL_TLS_BIND": "0.0.0.0:8443",
    }  # fmt: skip
    return subprocess.run(
        ["sh", str(SCRIPT), "-f", str(path)], env=environment, capture_output=True, text=True, check=False
    )


def test_the_endpoint_and_nothing_else_speaks_tls(tmp_path: Path) -> None:
    config = "frontend prometheus\n    bind :9101\nfrontend http\n    bind 127.0.0.1:8443\n  bind *:8404\n"

    done = start_haproxy(tmp_path, config)

    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in (tmp_path / "haproxy.cfg").read_text().splitlines() if "bind" in line]
    assert lines == [
        "bind 127.0.0.1:9101",
        "bind 0.0.0.0:8443 ssl crt /folder/tls.pem alpn h2,http/1.1",
        "bind 127.0.0.1:8404",
    ]


def test_a_configuration_without_a_line_for_tls_is_not_started(tmp_path: Path) -> None:
    done = start_haproxy(tmp_path, "frontend http\n    bind 127.0.0.1:8000\n")

    assert done.returncode == 1
    assert "no line to put TLS on" in done.stderr


def test_ids_that_are_no_plain_word_are_dropped_or_made_refusable_at_the_endpoint_alone(
    tmp_path: Path,
) -> None:
    config = "frontend prometheus\n    bind :9101\nfrontend http_frontend\n    bind 127.0.0.1:8443\n"

    start_haproxy(tmp_path, config)

    lines = (tmp_path / "haproxy.cfg").read_text().splitlines()
    rules = [
        "http-request del-header x-request-id unless { req.fhdr(x-request-id) -m reg ^[A-Za-z0-9._:-]{1,128}$ } "
        "!{ req.fhdr_cnt(x-request-id) gt 1 }",
        'http-request set-header x-session-id "not one word" if { req.fhdr(x-session-id) -m found } '
        "!{ req.fhdr(x-session-id) -m reg ^[!-~]{0,256}$ } or { req.fhdr_cnt(x-session-id) gt 1 }",
    ]
    first = lines.index("frontend http_frontend") + 1
    assert [line.strip() for line in lines[first : first + 2]] == rules
    assert sum("-id" in line for line in lines) == 2


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize("haproxy", [True, False], ids=["haproxy", "serve's own proxy"])
def test_a_cluster_speaks_https_only(start_cluster, pem: Path, haproxy: bool) -> None:
    served = start_cluster(
        "--scripted", "--replicas", "1", "--ssl-keyfile", str(pem / "a.key"), "--ssl-certfile", str(pem / "a.crt"),
        "--haproxy" if haproxy else "--no-haproxy", "--api-key", "sk-abcdef",
    )  # fmt: skip
    served.wait_until_up()
    url = f"https://127.0.0.1:{served.port}/v1/completions"
    body = {"model": served.model, "prompt": "hello", "max_tokens": 3}

    with httpx.Client(verify=str(pem / "a.crt"), timeout=60) as client:
        refused = client.post(url, json=body)
        answer = client.post(url, json=body, headers={"authorization": "Bearer sk-abcdef"})

    assert refused.status_code == 401
    assert answer.status_code == 200
    assert len(answer.headers.get_list("x-request-id")) == 1
    with pytest.raises(httpx.HTTPError):
        httpx.get(url.replace("https", "http"), timeout=10).raise_for_status()
    served.stop()
