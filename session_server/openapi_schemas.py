"""JSON schemas of the dialects' requests and replies, for the OpenAPI page. Pure data."""

from __future__ import annotations

__all__ = ["SCHEMAS"]

Json = dict[str, object]
Schemas = dict[str, Json]


# -- pieces -----------------------------------------------------------------------------------------


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: str = "", **properties: object) -> Json:
    """An object; other fields are allowed and ignored."""
    value: Json = {"type": "object", "properties": properties}
    if required:
        value["required"] = required.split()
    return value


def _list(items: Json, least: int = 0) -> Json:
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


def _any_of(*options: Json) -> Json:
    return {"anyOf": list(options)}


def _maybe(kind: str, **more: object) -> Json:
    return {"type": [kind, "null"], **more}


def _maybe_of(*options: Json) -> Json:
    return _any_of(*options, {"type": "null"})


def _is(*words: str) -> Json:
    return {"const": words[0]} if len(words) == 1 else {"enum": list(words)}


_TEXT: Json = {"type": "string"}
_NAME: Json = {"type": "string", "minLength": 1}
_FLAG = _maybe("boolean")
_FREE_OBJECT: Json = {"type": "object"}
_COUNT = _maybe("integer", minimum=1, maximum=2**31 - 1)
_UNSET: Json = {"enum": [None, False, 0, "", [], {}], "description": "Not supported; any other value is refused."}
_STOPS = _maybe_of(_NAME, {"type": "array", "items": _NAME, "maxItems": 32})
_SAMPLING: Json = {
    "temperature": _maybe("number", minimum=0, maximum=2),
    "top_p": _maybe("number", exclusiveMinimum=0, maximum=1),
    "top_k": _maybe("integer", minimum=-1, maximum=2**31 - 1),
}
_MORE_SAMPLING: Json = {
    **_SAMPLING,
    "min_p": _maybe("number", minimum=0, maximum=1),
    "frequency_penalty": _maybe("number", minimum=-2, maximum=2),
    "presence_penalty": _maybe("number", minimum=-2, maximum=2),
    "repetition_penalty": _maybe("number", exclusiveMinimum=0, maximum=2),
    "logit_bias": _maybe(
        "object",
        propertyNames={"pattern": "^[0-9]{1,9}$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        description="Decimal token id -> bias. An id that the vocabulary does not have is refused.",
    ),
    "seed": _maybe("integer", minimum=-(2**63), maximum=2**63 - 1),
    "stop": _STOPS,
}
_TEMPLATE = _maybe("object", properties={"enable_thinking": _FLAG}, additionalProperties=False)
_NAMED = "A tool that is not offered is refused."


def _parts(*names: str) -> Json:
    """Content: text, nothing, or parts of text."""
    return _maybe_of(_TEXT, _list(_any_of(*(_ref(name) for name in names))))


def _message(role: Json, content: Json, required: str = "role", **more: object) -> Json:
    return _object(required, role=role, content=content, **more)


# -- Chat Completions -------------------------------------------------------------------------------

_VERSION = {"type": "integer", "minimum": 0}
_OURS = _object("weight_versions", weight_versions=_object("start end", start=_VERSION, end=_VERSION))
"""What replies say beyond their dialect."""
_CHAT: Schemas = {
    "TextPart": _object("type text", type=_is("text", "input_text", "output_text"), text=_TEXT),
    "RefusalPart": _object("type refusal", type=_is("refusal"), refusal=_TEXT),
    "ChatToolCall": _any_of(
        _object(
            "function",
            id=_maybe("string"),
            type={"enum": [None, "function"]},
            function=_object("name", name=_TEXT, arguments=_any_of(_maybe("string"), _FREE_OBJECT)),
        ),
        _object(
            "type custom",
            id=_maybe("string"),
            type=_is("custom"),
            custom=_object("name", name=_TEXT, input=_maybe("string")),
        ),
    ),
    "ChatMessage": _any_of(
        _message(
            _is("system", "developer", "user"),
            _parts("TextPart", "RefusalPart"),
            tool_calls=_UNSET,
            function_call=_UNSET,
            audio=_UNSET,
        ),
        _message(
            _is("tool"),
            _parts("TextPart", "RefusalPart"),
            tool_call_id=_maybe("string"),
            tool_calls=_UNSET,
            function_call=_UNSET,
            audio=_UNSET,
        ),
        _message(
            _is("assistant"),
            _parts("TextPart", "RefusalPart"),
            reasoning_content=_maybe("string"),
            tool_calls=_any_of(_list(_ref("ChatToolCall")), _UNSET),
            function_call=_UNSET,
            audio=_UNSET,
        ),
    ),
    "ChatTool": _any_of(
        _object(
            "type function",
            type=_is("function"),
            function=_object(
                "name", name=_NAME, description=_maybe("string"), parameters=_maybe("object"), strict=_FLAG
            ),
        ),
        _object(
            "type custom",
            type=_is("custom"),
            custom=_object(
                "name",
                name=_NAME,
                description=_maybe("string"),
                format=_maybe_of(
                    _object("type", type=_is("text")),
                    _object(
                        "type grammar",
                        type=_is("grammar"),
                        grammar=_object("definition", definition=_TEXT, syntax=_is("lark", "regex")),
                    ),
                ),
            ),
        ),
    ),
    "ChatRequest": _object(
        "messages",
        model=_maybe("string"),
        messages=_list(_ref("ChatMessage"), 1),
        tools=_maybe_of(_list(_ref("ChatTool"))),
        tool_choice=_maybe_of(
            _is("auto", "none", "required"),
            {
                **_object("type function", type=_is("function"), function=_object("name", name=_NAME)),
                "description": _NAMED,
            },
            {**_object("type custom", type=_is("custom"), custom=_object("name", name=_NAME)), "description": _NAMED},
        ),
        parallel_tool_calls=_FLAG,
        response_format=_maybe_of(
            _object("type", type=_is("text", "json_object")),
            _object("type json_schema", type=_is("json_schema"), json_schema=_object("schema", schema=_FREE_OBJECT)),
        ),
        stream=_FLAG,
        stream_options=_maybe("object", properties={"include_usage": _FLAG}),
        n=_maybe("integer", minimum=1, maximum=128),
        max_tokens=_COUNT,
        max_completion_tokens=_COUNT,
        logprobs=_FLAG,
        top_logprobs=_maybe("integer", minimum=0, maximum=20, description="Needs logprobs to be true."),
        modalities={"enum": [None, [], ["text"]]},
        chat_template_kwargs=_TEMPLATE,
        functions=_UNSET,
        function_call=_UNSET,
        audio=_UNSET,
        web_search_options=_UNSET,
        stop_token_ids=_UNSET,
        ignore_eos=_UNSET,
        min_tokens=_UNSET,
        guided_json=_UNSET,
        continue_final_message=_UNSET,
        **_MORE_SAMPLING,
    ),
    "ChatCompletion": _object(
        "id object created model choices usage",
        id={"type": "string", "pattern": "^chatcmpl-"},
        tollway=_OURS,
        object=_is("chat.completion"),
        created={"type": "integer"},
        model=_TEXT,
        choices=_list(
            _object(
                "index message finish_reason",
                index={"type": "integer", "minimum": 0},
                message=_object("role content", role=_is("assistant"), content=_maybe("string")),
                finish_reason=_is("stop", "length", "tool_calls"),
            ),
            1,
        ),
        usage=_object(
            "prompt_tokens completion_tokens total_tokens",
            prompt_tokens={"type": "integer", "minimum": 0},
            completion_tokens={"type": "integer", "minimum": 0},
            total_tokens={"type": "integer", "minimum": 0},
        ),
    ),
    "OpenAIError": _object(
        "error",
        error=_object(
            "message type code param retryable",
            message=_TEXT,
            type=_TEXT,
            code=_TEXT,
            param=_maybe("string"),
            retryable={"type": "boolean"},
        ),
    ),
}

# -- Responses --------------------------------------------------------------------------------------

_CALL_OUTPUT = _parts("TextPart", "RefusalPart")
_THOUGHT = _maybe_of(_TEXT, _list(_object("type text", type=_is("reasoning_text", "summary_text", "text"), text=_TEXT)))
_RESPONSES: Schemas = {
    "ResponseItem": _any_of(
        _message(
            _is("system", "developer", "user", "assistant"),
            _parts("TextPart", "RefusalPart"),
            type=_is("message"),
        ),
        _object(
            "type",
            type=_is("reasoning"),
            summary=_THOUGHT,
            content=_THOUGHT,
            encrypted_content=_maybe("string"),
        ),
        _object(
            "type call_id name",
            type=_is("function_call"),
            call_id=_NAME,
            name=_NAME,
            namespace=_maybe("string"),
            arguments=_any_of(_maybe("string"), _FREE_OBJECT),
        ),
        _object("type call_id name input", type=_is("custom_tool_call"), call_id=_NAME, name=_NAME, input=_TEXT),
        _object(
            "type call_id output",
            type=_is("function_call_output", "custom_tool_call_output"),
            call_id=_NAME,
            output=_CALL_OUTPUT,
        ),
        _object(
            "type encrypted_content",
            type=_is("compaction"),
            encrypted_content={"type": "string", "pattern": "^tw1[.]([A-Za-z0-9]{4}){0,8}$"},
        ),
    ),
    "CompactionTrigger": {
        **_object("type", type=_is("compaction_trigger")),
        "description": "Last item only: asks for one compaction item in place of an answer.",
    },
    "ResponseFunction": _object(
        "type name",
        type=_is("function"),
        name=_NAME,
        description=_maybe("string"),
        parameters=_maybe("object"),
        strict=_FLAG,
    ),
    "ResponseCustomTool": _object(
        "type name",
        type=_is("custom"),
        name=_NAME,
        description=_maybe("string"),
        format=_maybe_of(
            _object("type", type=_is("text")),
            _object("type definition", type=_is("grammar"), definition=_TEXT, syntax=_is("lark", "regex")),
        ),
    ),
    "ResponseTool": _any_of(
        _ref("ResponseFunction"),
        _ref("ResponseCustomTool"),
        _object(
            "type name tools",
            type=_is("namespace"),
            name=_NAME,
            description=_maybe("string"),
            tools=_list(_any_of(_ref("ResponseFunction"), _ref("ResponseCustomTool"))),
        ),
        {
            **_object("type", type=_is("web_search", "file_search", "code_interpreter", "image_generation", "mcp")),
            "description": "Hosted: not shown to the model; the reply names it in tollway.left_out_tools.",
        },
    ),
    "ResponsesRequest": _object(
        "input",
        model=_maybe("string"),
        input=_any_of(
            _TEXT,
            {
                "type": "array",
                "minItems": 1,
                "items": _any_of(_ref("ResponseItem"), _ref("CompactionTrigger")),
            },
        ),
        instructions=_maybe("string"),
        tools=_maybe_of(_list(_ref("ResponseTool"))),
        tool_choice=_maybe_of(
            _is("auto", "none", "required"),
            {
                **_object("type name", type=_is("function", "custom"), name=_NAME, namespace=_maybe("string")),
                "description": _NAMED,
            },
        ),
        parallel_tool_calls=_FLAG,
        reasoning=_maybe(
            "object",
            properties={"effort": _maybe("string"), "summary": _maybe("string")},
        ),
        text=_maybe(
            "object",
            properties={
                "format": _maybe_of(
                    _object("type", type=_is("text", "json_object")),
                    _object("type schema", type=_is("json_schema"), schema=_FREE_OBJECT),
                ),
                "verbosity": _maybe("string"),
            },
        ),
        include=_maybe_of({"type": "array", "items": _NAME, "maxItems": 32}),
        max_output_tokens=_COUNT,
        top_logprobs=_maybe("integer", minimum=0, maximum=20),
        store=_FLAG,
        previous_response_id=_maybe(
            "string", description="A stored reply of this session; input then brings what is new."
        ),
        stream=_FLAG,
        metadata=_maybe("object"),
        user=_maybe("string"),
        truncation={"enum": [None, "disabled"]},
        background=_UNSET,
        conversation=_UNSET,
        context_management=_UNSET,
        prompt=_UNSET,
        chat_template_kwargs=_TEMPLATE,
        **_MORE_SAMPLING,
    ),
    "Response": _object(
        "id object created_at status model output tools tool_choice parallel_tool_calls usage",
        id={"type": "string", "pattern": "^resp_"},
        tollway=_OURS,
        object=_is("response"),
        created_at={"type": "integer"},
        status=_is("completed", "incomplete"),
        model=_TEXT,
        output=_list(
            _object(
                "id type",
                id=_NAME,
                type=_is("reasoning", "message", "function_call", "custom_tool_call", "compaction"),
            ),
            1,
        ),
        tools=_list(_FREE_OBJECT),
        usage=_object(
            "input_tokens output_tokens total_tokens output_tokens_details",
            input_tokens={"type": "integer", "minimum": 0},
            output_tokens={"type": "integer", "minimum": 0},
            total_tokens={"type": "integer", "minimum": 0},
        ),
    ),
}

# -- Messages ---------------------------------------------------------------------------------------

_TEXTS = _maybe_of(_TEXT, _list(_ref("TextBlock")))
_ASKED: Json = {
    "model": _maybe("string"),
    "system": _maybe_of(_TEXT, _list(_ref("TextBlock"))),
    "messages": _list(_ref("AnthropicInput"), 1),
    "tools": _maybe_of(_list(_ref("AnthropicTool"))),
    "tool_choice": _maybe_of(
        _object("type", type=_is("auto", "any"), disable_parallel_tool_use=_FLAG),
        _object("type", type=_is("none"), disable_parallel_tool_use=_FLAG),
        {
            **_object("type name", type=_is("tool"), name=_NAME, disable_parallel_tool_use=_FLAG),
            "description": _NAMED,
        },
    ),
    "thinking": _maybe_of(
        _object("type", type=_is("enabled", "disabled", "adaptive", "between_tools"), display=_maybe("string"))
    ),
    "output_config": _maybe(
        "object",
        properties={
            "effort": _maybe("string"),
            "format": _maybe_of(_object("type schema", type=_is("json_schema"), schema=_FREE_OBJECT)),
        },
    ),
    "context_management": _maybe(
        "object",
        properties={
            "edits": _list(
                _object(
                    "type keep",
                    type=_is("clear_thinking_20251015"),
                    keep=_any_of(_is("all"), {"const": {"type": "all"}}),
                )
            ),
        },
    ),
    "mcp_servers": _UNSET,
    "container": _UNSET,
}
_MESSAGES: Schemas = {
    "TextBlock": _object("type text", type=_is("text"), text=_TEXT),
    "AnthropicInput": _any_of(
        _message(
            _is("user"),
            _maybe_of(
                _TEXT,
                _list(
                    _any_of(
                        _ref("TextBlock"),
                        _object(
                            "type tool_use_id",
                            type=_is("tool_result"),
                            tool_use_id=_NAME,
                            content=_TEXTS,
                            is_error=_FLAG,
                        ),
                    )
                ),
            ),
        ),
        _message(
            _is("assistant"),
            _maybe_of(
                _TEXT,
                _list(
                    _any_of(
                        _ref("TextBlock"),
                        _object("type thinking", type=_is("thinking"), thinking=_TEXT, signature=_maybe("string")),
                        _object("type", type=_is("redacted_thinking")),
                        _object("type id name", type=_is("tool_use"), id=_TEXT, name=_NAME, input=_maybe("object")),
                    )
                ),
            ),
        ),
        _message(_is("system"), _TEXTS),
    ),
    "AnthropicTool": _any_of(
        _object(
            "name input_schema",
            type={"enum": [None, "custom"]},
            name=_NAME,
            description=_maybe("string"),
            input_schema=_FREE_OBJECT,
            strict=_FLAG,
        ),
        {
            **_object("type", type={"type": "string", "pattern": "^(web_search|web_fetch|code_execution)_[0-9]{8}$"}),
            "description": "Runs at the provider: not shown to the model; the reply names it in "
            "tollway.left_out_tools.",
        },
    ),
    "MessagesRequest": _object(
        "messages", max_tokens=_COUNT, stop_sequences=_STOPS, stream=_FLAG, **_ASKED, **_SAMPLING
    ),
    "CountTokensRequest": _object("messages", **_ASKED),
    "TokenCount": _object("input_tokens", input_tokens={"type": "integer", "minimum": 0}),
    "AnthropicMessage": _object(
        "id type role model content stop_reason stop_sequence usage",
        id={"type": "string", "pattern": "^msg_"},
        tollway=_OURS,
        type=_is("message"),
        role=_is("assistant"),
        model=_TEXT,
        content=_list(_object("type", type=_is("thinking", "text", "tool_use"))),
        stop_reason=_is("end_turn", "tool_use", "max_tokens", "stop_sequence"),
        stop_sequence=_maybe("string"),
        usage=_object(
            "input_tokens output_tokens",
            input_tokens={"type": "integer", "minimum": 0},
            output_tokens={"type": "integer", "minimum": 0},
        ),
    ),
    "AnthropicError": _object(
        "type error",
        type=_is("error"),
        error=_object("type message code", type=_TEXT, message=_TEXT, code=_TEXT),
    ),
}

SCHEMAS: Schemas = {
    **_CHAT,
    **_RESPONSES,
    **_MESSAGES,
    "ModelList": _object(
        "object data",
        object=_is("list"),
        data=_list(_object("id object", id=_TEXT, object=_is("model")), 1),
    ),
}
"""By name, as ``#/components/schemas/...`` refers to them."""
