"""schemathesis over the served OpenAPI: the server does what its own description says.

Bodies that the schema allows are accepted unless two of their fields contradict each other, those that it forbids
are refused, and every answer has a documented status, type and form.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import schemathesis
from fuzz_arena import FULL, QUIET, Arena, arena
from fuzz_ground import FAMILIES
from fuzz_talk import PATHS, understand
from fuzz_wire import Answer, Shot
from hypothesis import given, settings
from schemathesis.checks import CHECKS, load_all_checks

__all__ = ["arena"]

load_all_checks()
FORM = CHECKS.get_by_names(["status_code_conformance", "content_type_conformance", "response_headers_conformance"])
WHOLE = CHECKS.get_by_names(["response_schema_conformance"])
REFUSES = CHECKS.get_by_names(["negative_data_rejection"])
ROUTES = [*(path.decode() for path in PATHS.values()), "/v1/messages/count_tokens"]
MODES = list(schemathesis.GenerationMode)
DROPPED = {"content-length", "transfer-encoding", "host", "connection"}
CONTRADICTIONS = re.compile(
    r"which is not offered|two tools have the same name|needs tools|top_logprobs needs logprobs|cannot force a tool"
    r"|exclude each other|ids go up to|is no stored reply|must be the last item|was not made here|cannot be kept to one"
    r"|constrains the whole reply|chat_template_kwargs|cannot render|longer than|context length|thinking"
)
"""What a schema cannot say: how two fields go together, and what only the server knows."""


@pytest.mark.parametrize(
    ("arena", "examples"),
    [("compact", 10), *(pytest.param(each, 600, marks=FULL) for each in FAMILIES)],
    indirect=["arena"],
)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("route", ROUTES)
def test_the_server_does_what_its_description_says(arena: Arena, route: str, mode: Any, examples: int) -> None:
    schema = schemathesis.openapi.from_dict(arena.run(document(arena)))
    alone, owned = schema[route]["POST"], schema["/sessions/{session_id}" + route]["POST"]
    camp = arena.shared
    mine = {"session_id": camp.session_id}
    counts: Counter[int] = Counter()

    @settings(QUIET, max_examples=examples)
    @given(alone.as_strategy(mode) | owned.as_strategy(mode, path_parameters=mine))
    def check(case: Any) -> None:
        request = requests.Request(**case.as_transport_kwargs(base_url=arena.place.server.url)).prepare()
        answer = arena.run(arena.place.fire(camp, shot_of(request), prefix=False))
        counts[answer.status] += 1
        examine(case, request, answer)

    check()
    assert counts[200 if mode is schemathesis.GenerationMode.POSITIVE else 400] > 0.3 * examples, counts
    arena.run(arena.place.still_serves(camp))
    arena.run(arena.place.prove(camp))


async def document(arena: Arena) -> dict[str, Any]:
    """The description as it is served, without headers: what is wrong has to be wrong in the body."""
    async with arena.place.server.http.get(arena.place.server.url + "/openapi.json") as response:
        served = dict(await response.json())
    for item in served["paths"].values():
        for operation in item.values():
            operation.pop("security", None)
            operation["parameters"] = [each for each in operation.get("parameters", ()) if each["in"] != "header"]
    return served


def shot_of(request: requests.PreparedRequest) -> Shot:
    """The request as it goes over the wire, with our own framing."""
    parts = urlsplit(request.url or "")
    body = request.body or b""
    headers = tuple(
        (name.encode("latin-1"), value if isinstance(value, bytes) else value.encode("latin-1"))
        for name, value in request.headers.items()
        if name.lower() not in DROPPED
    )
    path = parts.path + ("?" + parts.query if parts.query else "")
    return Shot(path.encode(), body.encode() if isinstance(body, str) else body, headers=headers)


def examine(case: Any, request: requests.PreparedRequest, answer: Answer) -> None:
    """Check the answer against the description of its route."""
    headers = {name: [value] for name, value in answer.headers.items()}
    response = schemathesis.Response(answer.status, headers, answer.body, request, 0.1, verify=False)
    streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
    positive = case.meta.generation.mode is schemathesis.GenerationMode.POSITIVE
    case.validate_response(response, checks=[*FORM, *([] if streamed else WHOLE), *([] if positive else REFUSES)])
    if streamed:
        dialect = next(name for name, path in PATHS.items() if case.path.endswith(path.decode()))
        assert understand(dialect, answer).whole
    if positive and answer.status != 200:
        message = json.loads(answer.body)["error"]["message"]
        assert CONTRADICTIONS.search(message), f"{answer.status} {message}: {request.body!r:.2000}"
