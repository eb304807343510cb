"""Cutting large values out of a reply never changes what the reply says."""

from __future__ import annotations

import base64

import numpy as np
import orjson
import pytest

from tollway.errors import UpstreamError
from tollway.router.blobs import decode_blob, load_reply, narrow_signed, narrow_unsigned

NAMES = ("routed_experts", "indexer_topk")
LONG = base64.b64encode(np.arange(9000, dtype="<i4").tobytes()).decode()


def plain(value: object) -> object:
    """A reply with its views written out."""
    if isinstance(value, memoryview):
        return bytes(value).decode()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def meta(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    found = value["meta_info"]
    assert isinstance(found, dict)
    return found


def test_the_value_is_a_view_of_the_body_and_decodes_to_its_bytes() -> None:
    body = orjson.dumps({"text": "x", "meta_info": {"a": 1, "routed_experts": LONG, "b": 2, "indexer_topk": LONG}})
    found = load_reply(body, NAMES)
    for name in NAMES:
        view = meta(found)[name]
        assert isinstance(view, memoryview)
        assert view.obj is body
        assert decode_blob(name, view) == base64.b64decode(LONG)
    assert plain(found) == orjson.loads(body)
    assert meta(load_reply(body))["routed_experts"] == LONG  # not asked for


@pytest.mark.parametrize(
    ("body", "cut"),
    [
        (r'{"text": "{\"routed_experts\":\"AA\"}", "meta_info": {"routed_experts":"LONG"}}', True),
        (r'{"text": "\\,\"routed_experts\":\"", "meta_info": {"routed_experts":"LONG"}}', True),
        ('{"meta_info": {\n"routed_experts":"LONG"}}', True),
        ('{"meta_info": {"routed_experts" : "LONG"}}', False),
        ('{"meta_info": {"routed_experts":"LONG\\/"}}', False),
        ('{"meta_info": {"routed_experts":"LONG\\""}}', False),
        ('{"meta_info": {"routed_experts":"LONG\\u0041"}}', False),
        ('{"routed_experts":"LONG","meta_info": {"routed_experts":"AA"}}', False),
        ('{"meta_info": {"routed_experts":"LONG","routed_experts":"AA"}}', False),
        ('{"meta_info": {"routed_experts":"AA","routed_experts":"LONG"}}', False),
        ('{"meta_info": {"routed_experts":"LONG","routed\\u005fexperts":"AA"}}', False),
        ('{"meta_info": {"inner": {"routed_experts":"LONG"}}}', False),
        ('{"meta_info": [{"routed_experts":"LONG"}]}', False),
        ('[{"routed_experts":"LONG"}]', False),
        ('{"meta_info": {"routed_experts":null, "x": "LONG"}}', False),
        ('{"meta_info": {"my_routed_experts":"LONG"}}', False),
    ],
)
def test_whatever_the_body_looks_like_it_means_what_the_plain_parser_says(body: str, cut: bool) -> None:
    body = body.replace("LONG", LONG)
    found = load_reply(body.encode(), NAMES)
    assert plain(found) == orjson.loads(body)
    inner = found.get("meta_info") if isinstance(found, dict) else None
    assert (isinstance(inner, dict) and isinstance(inner.get("routed_experts"), memoryview)) is cut


@pytest.mark.parametrize("end", ['"', '"}', '"}}x', ""])
def test_half_a_body_is_an_error_as_with_the_plain_parser(end: str) -> None:
    body = f'{{"meta_info": {{"routed_experts":"{LONG}{end}'.encode()
    with pytest.raises(orjson.JSONDecodeError):
        load_reply(body, NAMES)


def test_numbers_are_kept_in_the_smallest_type_that_holds_them() -> None:
    def packed(*numbers: int) -> bytes:
        return np.array(numbers, "<i4").tobytes()

    assert narrow_unsigned(packed(0, 255), "x").dtype == np.uint8
    assert narrow_unsigned(packed(0, 256), "x").tolist() == [0, 256]
    assert narrow_unsigned(packed(65535), "x").dtype == np.uint16
    assert narrow_unsigned(b"", "x").size == 0
    for wrong in (65536, -1, -(2**31)):
        with pytest.raises(UpstreamError, match=f"x is {wrong},"):
            narrow_unsigned(packed(3, wrong), "x")
    assert narrow_signed(packed(-1, 32767), "x").dtype == np.int16
    assert narrow_signed(packed(-1, 32768), "x").tolist() == [-1, 32768]
    assert narrow_signed(b"", "x").size == 0
    with pytest.raises(UpstreamError, match="-2"):
        narrow_signed(packed(-2), "x")


@pytest.mark.parametrize("value", [None, 5, ["AA=="], "AA", "é", memoryview(b"A A="), memoryview(b"====")])
def test_what_is_no_base64_is_an_upstream_error(value: object) -> None:
    with pytest.raises(UpstreamError, match="routes"):
        decode_blob("routes", value)
