"""/openapi.json against the routes as they are: every path, what it takes and what it gives."""

from __future__ import annotations

from fake_workers import FakeWorker
from rig import MODEL, served

from baton.router.bodies import BODIES
from baton.router.tokenizer import Tokenizer


async def test_the_document_tells_every_route_and_what_it_really_answers(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker()) as api:
        document = (await api.http.get("/openapi.json")).json()
        posts = {next(iter(operations.values()))["operationId"] for operations in document["paths"].values()}
        assert posts >= set(BODIES)
        for path, operations in document["paths"].items():
            for operation in operations.values():
                for reply in operation["responses"].values():
                    assert reply["content"]
            if "get" not in operations or path == "/status/events":  # which never ends
                continue
            reply = await api.http.get(path.replace("{name}", MODEL))
            told = operations["get"]["responses"]["200"]["content"]
            assert (reply.status_code, reply.headers["content-type"].split(";")[0] in told) == (200, True), path


async def test_every_reference_leads_somewhere(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeWorker()) as api:
        text = (await api.http.get("/openapi.json")).text
        schemas = (await api.http.get("/openapi.json")).json()["components"]["schemas"]
        names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
        assert names <= set(schemas)
