"""The certificate of the HTTPS endpoint: checked before anything starts, put together as HAProxy wants it."""

from __future__ import annotations

import contextlib
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from deploy.settings import ServeSettings
from workers.engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A private key and its certificate, both PEM, readable and belonging together."""

    key: Path
    certificate: Path

    def write_bundle(self, path: Path) -> None:
        """Write certificate and key into one file that only this user can read."""
        content = self.certificate.read_bytes().rstrip() + b"\n" + self.key.read_bytes()
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as bundle:
            bundle.write(content)


def tls_files(settings: ServeSettings) -> TlsFiles | None:
    """The files that settings name; None where the API is to speak plain HTTP.

    Raises:
        InvalidRequest: one of the two is missing, or they do not make a certificate.
    """
    key, certificate = settings.ssl_keyfile, settings.ssl_certfile
    if key is None and certificate is None:
        return None
    if key is None or certificate is None:
        given, missing = (
            ("--ssl-certfile", "ssl_keyfile") if key is None else ("--ssl-keyfile", "ssl_certfile")
        )
        raise InvalidRequest(f"{given} needs --{missing.replace('_', '-')} beside it", missing)
    for path, param in ((key, "ssl_keyfile"), (certificate, "ssl_certfile")):
        try:
            path.open("rb").close()
        except OSError as error:
            raise InvalidRequest(
                f"--{param.replace('_', '-')} {path} cannot be read ({error.strerror}): give a PEM file",
                param,
            ) from None
    _check_pair(key, certificate)
    return TlsFiles(key.absolute(), certificate.absolute())


def _check_pair(key: Path, certificate: Path) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if b"ENCRYPTED" in key.read_bytes():
            raise InvalidRequest(
                f"--ssl-keyfile {key} has a password, which nobody could type here: give the key without one "
                "(openssl pkey -in KEY -out PLAIN)",
                "ssl_keyfile",
            )
        server.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:  # of which ssl.SSLError is one
        reason = getattr(error, "reason", None) or "one of them is no PEM file of its kind, give such"
        raise InvalidRequest(
            f"--ssl-certfile {certificate} and --ssl-keyfile {key} are no certificate and its key: {reason}",
            "ssl_certfile",
        ) from None
    try:
        _shake_hands(server, certificate)
    except ssl.SSLCertVerificationError as error:
        raise InvalidRequest(
            f"--ssl-certfile {certificate} would be refused by every client: {error.verify_message}",
            "ssl_certfile",
        ) from None


def _shake_hands(server_context: ssl.SSLContext, certificate: Path) -> None:
    """In memory, as a client that trusts this very certificate: its dates are what can still be wrong.

    Raises:
        SSLCertVerificationError: the client refuses it.
    """
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client_context.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
