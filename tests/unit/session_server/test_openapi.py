"""The OpenAPI description of the model calls: whole, and true to what the dialects accept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from dialect_helpers import wish_of

from tollway.errors import BadRequest
from tollway.session_server.dialects.base import Dialect
from tollway.session_server.dialects.chat import CHAT
from tollway.session_server.dialects.messages import MESSAGES
from tollway.session_server.dialects.responses import RESPONSES
from tollway.session_server.openapi import dialect_components, dialect_paths

COMPONENTS: Any = dialect_components()
PATHS: Any = dialect_paths()
REQUESTS: list[tuple[Dialect, str]] = [
    (CHAT, "ChatRequest"),
    (RESPONSES, "ResponsesRequest"),
    (MESSAGES, "MessagesRequest"),
    (MESSAGES, "CountTokensRequest"),
]
USER = {"role": "user", "content": "go"}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    known = {f"#/components/schemas/{name}" for name in COMPONENTS["schemas"]}
    assert set(references([PATHS, COMPONENTS])) == known


def test_every_route_is_there_with_and_without_its_session() -> None:
    routes = {(path, method) for path, item in PATHS.items() for method in item}
    for prefix in ("", "/sessions/{session_id}"):
        for path in ("chat/completions", "responses", "messages", "messages/count_tokens"):
            assert (f"{prefix}/v1/{path}", "post") in routes
        assert (f"{prefix}/v1/models", "get") in routes
        assert (prefix or "/", "head") in routes
    assert len(routes) == 12


def test_every_model_call_tells_how_it_can_fail() -> None:
    names = set()
    for path, item in PATHS.items():
        for method, operation in item.items():
            names.add(operation["operationId"])
            parameters = {each["name"] for each in operation["parameters"]}
            assert ("session_id" in parameters) == ("{session_id}" in path)
            if method == "post":
                assert {"200", "400", "401", "404", "409", "429", "499", "502", "503", "507"} <= set(
                    operation["responses"]
                )
    assert len(names) == 12, "operation ids are unique"


def test_the_document_is_json_and_its_own_copy_each_time() -> None:
    assert json.loads(json.dumps(PATHS)) == PATHS
    assert dialect_paths() is not dialect_paths()


@pytest.mark.parametrize(
    ("dialect", "name"), REQUESTS, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_words_that_the_schema_lists_are_words_that_the_dialect_takes(dialect: Dialect, name: str) -> None:
    """Each listed value of each field is accepted; the values of unsupported fields wish for nothing."""
    fields = COMPONENTS["schemas"][name]["properties"]
    checked = 0
    for field, schema in fields.items():
        for option in (schema, *schema.get("anyOf", ())):
            for value in [*option.get("enum", ()), *([option["const"]] if "const" in option else ())]:
                wish_of(dialect, {dialect.list_field: [USER], field: value})
                checked += 1
    assert checked > 5


@pytest.mark.parametrize(
    ("dialect", "name"), REQUESTS, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_bounds_that_the_schema_gives_are_the_bounds_of_the_dialect(dialect: Dialect, name: str) -> None:
    fields = COMPONENTS["schemas"][name]["properties"]
    bounded = 0
    for field, schema in fields.items():
        for bound, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
            if bound not in schema or field == "top_logprobs":
                continue
            bounded += 1
            with pytest.raises(BadRequest):
                dialect.wish({field: schema[bound] + step})
            if bound != "exclusiveMinimum":
                dialect.wish({field: schema[bound]})
    assert bounded >= (0 if name == "CountTokensRequest" else 5)
