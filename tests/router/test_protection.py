"""What operators rely on: TLS, no cross-origin calls unless allowed, and no word of a prompt in the logs."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from fake_workers import FakeWorker
from pydantic import ValidationError

from baton.router.config import RouterConfig
from baton.router.gateway import Gateway
from baton.router.generation_config import SamplingDefaults
from baton.router.tokenizer import Tokenizer
from tests.router.rig import MODEL, served


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for localhost and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1)).add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption()))
    return cert_file, key_file


async def test_tls_is_spoken_when_it_is_configured(tokenizer: Tokenizer, tmp_path: Path) -> None:
    cert_file, key_file = self_signed(tmp_path)
    config = RouterConfig(host="127.0.0.1", advertise_host="localhost", drain_s=0).model_copy(
        update={"host": "0.0.0.0", "tls_cert_file": cert_file, "tls_key_file": key_file}
    )
    gateway = Gateway(config, "unused", MODEL)
    url = await gateway.serve(tokenizer, SamplingDefaults())
    try:
        assert url.startswith("https://localhost:")
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(cert_file))) as http:
            assert (await http.get(f"{url}/live")).status_code == 200
            with pytest.raises(httpx.TransportError):
                await http.get(url.replace("https", "http") + "/live")
    finally:
        await gateway.stop()


def test_half_a_tls_configuration_is_refused() -> None:
    with pytest.raises(ValidationError, match="set both, or neither"):
        RouterConfig(tls_cert_file=Path("cert.pem"))


async def test_pages_of_other_origins_may_call_only_if_configured(tokenizer: Tokenizer) -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    async with served(tokenizer, FakeWorker()) as api:
        assert not any("access-control" in name for name in (await api.http.get("/live", headers=asked)).headers)
        assert (await api.http.options("/v1/completions", headers=asked)).status_code == 405
    config = RouterConfig(cors_origins=("https://app.example",))
    async with served(tokenizer, FakeWorker(), config=config) as api:
        allowed = await api.http.options("/v1/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        other = await api.http.get("/live", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_no_log_line_has_a_word_of_a_prompt_or_a_key(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    secret = "xyzzy plugh"
    worker = FakeWorker(step_s=0.002)
    async with served(tokenizer, worker) as api:
        api.http.headers["authorization"] = f"Bearer {secret}"
        ask = [{"role": "user", "content": secret}]
        await api.chat(messages=ask, max_tokens=2)
        await api.chat(messages=ask, temperature=9)
        await api.http.post("/v1/chat/completions", content=f'{{"messages": "{secret}'.encode())
        await api.http.post("/tokenize", json={"prompt": secret})
        worker.error = secret[::-1]
        await api.chat(messages=ask)
        worker.error = None
        streaming = asyncio.create_task(api.events(messages=ask, max_tokens=500))
        while worker.num_running == 0:
            await asyncio.sleep(0.002)
        await worker.kill()
        await streaming
        assert caplog.records
        tokens = ", ".join(map(str, tokenizer.encode_prompt_now(secret)))
        assert not any(word in caplog.text for word in (secret, "xyzzy", "plugh", tokens))
