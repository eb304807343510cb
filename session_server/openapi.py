"""OpenAPI 3.1 paths of the model calls, which are plain ASGI and which FastAPI therefore does not know.

Says what is accepted as tightly as JSON Schema can: fields that change what is generated and that are refused
appear with the values that wish for nothing. What depends on two fields at once (a named tool that is not
offered) is in the descriptions. Pure data; the schemas are in ``openapi_schemas``.
"""

from __future__ import annotations

from tollway.session_server.openapi_schemas import SCHEMAS

__all__ = ["dialect_components", "dialect_paths"]

Json = dict[str, object]
_PREFIX = "/sessions/{session_id}"
_SESSION_ID: Json = {
    "name": "session_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_-]+$"},
}
_IDEMPOTENCY_KEY: Json = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "The same key and body give the same reply again, without a second generation.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}
_VERSIONS: list[Json] = [
    {
        "name": name,
        "in": "header",
        "description": f"{words} that may serve the call; 409 when no engine has it within router.version_wait_s.",
        "schema": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1},
    }
    for name, words in (
        ("X-Tollway-Min-Version", "Oldest weight version"),
        ("X-Tollway-Exact-Version", "The only weight version"),
    )
]
_FAILURES = {
    "400": "The request can never succeed as it stands; the message names the field.",
    "401": "No valid session token. Unknown and foreign sessions answer the same.",
    "404": "No such route.",
    "409": "No engine serves the wanted policy version yet, or the state does not allow the call.",
    "422": "What the request makes cannot be recorded.",
    "429": "A limit is reached; try again after Retry-After seconds.",
    "499": "The client went away or the session was deleted while the engine was generating.",
    "500": "A fault of this server; its log says more.",
    "502": "The engine answered something that cannot be recorded as truth.",
    "503": "No engine can take the call now, or the one that had it was lost or has no room.",
    "507": "The journal cannot be written; nothing was recorded.",
}
_DIALECTS = (
    ("/v1/chat/completions", "chat", "OpenAI Chat Completions", "ChatRequest", "ChatCompletion", "OpenAIError"),
    ("/v1/responses", "responses", "OpenAI Responses", "ResponsesRequest", "Response", "OpenAIError"),
    ("/v1/messages", "messages", "Anthropic Messages", "MessagesRequest", "AnthropicMessage", "AnthropicError"),
)


def dialect_paths() -> dict[str, object]:
    """Path items of every dialect route, with and without the session in the path.

    >>> sorted(dialect_paths())[0]
    '/'
    """
    paths: dict[str, object] = {}
    for prefix in ("", _PREFIX):
        for path, name, title, asked, answered, failed in _DIALECTS:
            operation = _operation(f"{name}{_suffix(prefix)}", title, asked, answered, failed)
            operation["parameters"] = [*_parameters(prefix), _IDEMPOTENCY_KEY, *_VERSIONS]
            _stream(operation)
            paths[prefix + path] = {"post": operation}
        count = _operation(
            f"count_tokens{_suffix(prefix)}",
            "Tokens that the prompt of a Messages request has",
            "CountTokensRequest",
            "TokenCount",
            "AnthropicError",
        )
        count["parameters"] = _parameters(prefix)
        paths[f"{prefix}/v1/messages/count_tokens"] = {"post": count}
        models = _operation(f"models{_suffix(prefix)}", "The one model", None, "ModelList", "OpenAIError")
        models["parameters"] = _parameters(prefix)
        paths[f"{prefix}/v1/models"] = {"get": models}
        paths[prefix or "/"] = {"head": _reachable(prefix)}
    return paths


def dialect_components() -> dict[str, object]:
    """``components`` that the paths refer to."""
    return {
        "schemas": SCHEMAS,
        "securitySchemes": {
            "sessionBearer": {"type": "http", "scheme": "bearer", "description": "The session token."},
            "sessionKey": {
                "type": "apiKey",
                "in": "header",
                "name": "x-api-key",
                "description": "The session token, as Anthropic's SDKs send keys.",
            },
        },
    }


def _suffix(prefix: str) -> str:
    return "_of_session" if prefix else ""


def _parameters(prefix: str) -> list[Json]:
    return [_SESSION_ID] if prefix else []


def _operation(name: str, title: str, asked: str | None, answered: str, failed: str) -> Json:
    responses: Json = {"200": {"description": title, "content": _json(answered)}}
    for status, text in _FAILURES.items():
        answer: Json = {"description": text, "content": _json(failed)}
        if status == "429":
            answer["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}
        responses[status] = answer
    operation: Json = {
        "operationId": name,
        "summary": title,
        "tags": ["model calls"],
        "security": [{"sessionBearer": []}, {"sessionKey": []}],
        "responses": responses,
    }
    if asked is not None:
        operation["requestBody"] = {"required": True, "content": _json(asked)}
    return operation


def _stream(operation: Json) -> None:
    """Adds the streamed form of a reply."""
    events = {"schema": {"type": "string", "description": "Server-sent events of the dialect."}}
    answer = operation["responses"]["200"]  # type: ignore[index]  # made by _operation
    answer["content"]["text/event-stream"] = events


def _reachable(prefix: str) -> Json:
    return {
        "operationId": f"reachable{_suffix(prefix)}",
        "summary": "What some harnesses send before their first call. Says nothing about sessions",
        "tags": ["model calls"],
        "parameters": _parameters(prefix),
        "responses": {"200": {"description": "The server is there."}},
    }


def _json(name: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
