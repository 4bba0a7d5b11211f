"""The certificate of the HTTPS endpoint: checked before anything starts, put together as HAProxy wants it."""

from __future__ import annotations

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
        if not os.access(path, os.R_OK):
            raise InvalidRequest(f"--{param.replace('_', '-')} {path} cannot be read", param)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise InvalidRequest(
            f"{certificate} and {key} are no certificate and its key: {reason}", "ssl_certfile"
        ) from None
    return TlsFiles(key.absolute(), certificate.absolute())
