"""The token cases that a family has a part in: what it must do with ids, row by row.

Depends on ``subject``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from tollway.errors import BadRequest, TollwayError
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.session_server.families.base import RenderOptions
from tollway.session_server.families.specimens import CALLS, RESULTS, TAILS, TOOLS, USER
from tollway.session_server.families.subject import Check, Failed, NotApplicable, Subject, text_of
from tollway.session_server.families.tokenized import TokenizedFamily
from tollway.session_server.tokens import GUARD

__all__ = ["token_cases"]


def _drift(*pieces: str) -> Check:
    def check(subject: Subject) -> str:
        apart = [token for piece in pieces for token in subject.encode(piece)]
        return subject.same_suffix(apart, subject.encode("".join(pieces)))

    return check


def _after_think(subject: Subject) -> str:
    family = subject.tokenized
    if family.think is None or family.think[1] not in family.tokenizer.control:
        raise NotApplicable("thinking has no control id here")
    close = family.tokenizer.control[family.think[1]]
    if subject.specimens.thought:
        plain, _ = subject.answered()
        new = TAILS[0][1]
        sampled = [*subject.encode("r"), close, *subject.encode("\n"), *subject.encode("\nok"), plain.sampled[-1]]
        merged = [*subject.encode("r"), close, *subject.encode("\n\nok"), plain.sampled[-1]]
        one, two = (subject.extend(ids, new, reply=plain.message) for ids in (sampled, merged))
        if one != two:
            raise Failed(f"behind {sampled} come {one}, behind {merged} come {two}")
        return f"{sampled} kept"
    return subject.same_suffix(
        [close, *subject.encode("\n"), *subject.encode("\nok")], [close, *subject.encode("\n\nok")]
    )


def _sampled_end(subject: Subject) -> str:
    reply, rest = subject.answered()
    added = subject.extend(reply.sampled, TAILS[0][1], reply=reply.message)
    if added is not None and added != rest:
        raise Failed(f"behind {list(reply.sampled)} come {added}, a whole rendering has {rest}")
    return "branch" if added is None else f"{added[:3]} behind {reply.sampled[-1]}"


def _cut_by_length(subject: Subject) -> str:
    reply, rest = subject.answered()
    added = subject.extend(reply.sampled[:-1], TAILS[0][1], reply=reply.message, finish="length")
    if added is None:
        return "branch"
    close = subject.close_of(added, rest, reply.sampled[-1])
    thought = subject.specimens.thought
    if not thought:
        return f"closed by {close}"
    cut = subject.extend(thought[:-1], TAILS[0][1], reply=Message(role="assistant", reasoning="hm"), finish="length")
    if cut is None:
        return f"closed by {close}; branch inside thinking"
    if thought[-1] not in cut[: len(cut) - len(rest)]:
        raise Failed(f"thinking {list(thought[:-1])} stays open: {cut} has no {thought[-1]}")
    return f"closed by {close}, inside thinking by {cut[: len(cut) - len(rest)]}"


def _stop_string(subject: Subject) -> str:
    reply, rest = subject.answered()
    ids = [*subject.specimens.thought, *subject.encode("look\nObservation: x")]
    verdict = subject.read(ids, (), "\nObservation:")
    if verdict.content != "look":
        raise Failed(f"{ids} cut at '\\nObservation:' reads {verdict.content!r}, not 'look'")
    added = subject.extend(ids, TAILS[0][1], reply=Message(role="assistant", content="look"))
    return "branch" if added is None else f"closed by {subject.close_of(added, rest, reply.sampled[-1])}"


def _other_ends(subject: Subject) -> str:
    """A stop id that belongs to another next turn must not stay in a context where it is wrong."""
    tools = dict(zip(("<|user|>", "<|observation|>"), (TAILS[0][1], RESULTS[:1]), strict=True))
    family = subject.tokenized
    known = {text: family.tokenizer.control[text] for text in tools if text in family.tokenizer.control}
    known = {text: token for text, token in known.items() if token in family.stop_ids}
    if not known:
        raise NotApplicable("no reply ends by opening the next turn")
    reply, _ = subject.answered()
    for text, token in known.items():
        for other, new in tools.items():
            added = subject.extend([*reply.sampled[:-1], token], new, reply=reply.message)
            written = subject.specimens.written(reply.message, new)
            if written is not None and written[0][-1] == token:
                continue
            if other != text and added is not None:
                raise Failed(f"{token} ({text}) stays before {added}")
            if other == text and added is not None and added[:1] == [token]:
                raise Failed(f"{token} ({text}) is written twice")
    return "a branch unless the turn comes that was opened"


def _thinking_kept(subject: Subject) -> str:
    family = subject.tokenized
    if family.think is None:
        raise NotApplicable("no thinking")
    thought = subject.specimens.thought
    if not thought:
        thought = (
            *family.tokenizer.encode(family.think[0]),
            *subject.encode("hm"),
            *family.tokenizer.encode(family.think[1]),
        )
    reply, rest = subject.answered()
    answer = [*subject.encode("ok then"), reply.sampled[-1]]
    added = subject.extend(
        [*thought, *answer], TAILS[0][1], reply=Message(role="assistant", reasoning="hm", content="ok then")
    )
    if added is None:
        return "branch: this template rewrites its history"
    if added != rest:
        raise Failed(f"behind thinking {list(thought)} come {added}, not {rest}")
    return "kept, append-only"


def _thinking_switch(subject: Subject) -> str:
    family = subject.tokenized
    if not family.switch:
        try:
            family.render_prompt([USER], (), RenderOptions(thinking=False))
        except BadRequest:
            raise NotApplicable("no switch; asking for one is refused") from None
        raise Failed("this family has no thinking switch and does not say so")
    reply, _ = subject.answered()
    new = TAILS[0][1]
    on, off = (
        subject.extend(reply.sampled, new, reply=reply.message, options=RenderOptions(thinking=wanted))
        for wanted in (True, False)
    )
    if on is None or off is None:
        return "branch"
    if on != off:
        return "changes the suffix only"
    first = [family.render_prompt([USER], (), RenderOptions(thinking=wanted)).tolist() for wanted in (True, False)]
    if first[0] == first[1]:
        raise Failed(f"the switch changes nothing: {on}")
    return "stands at the beginning: a conversation keeps the one that it began with"


def _foreign_text(subject: Subject) -> str:
    family = subject.tokenized
    controls = family.tokenizer.control
    for text in controls:
        if found := family.tokenizer.control_ids.intersection(subject.encode(text)):
            raise Failed(f"{text!r} typed by a user gives {sorted(found)}")
    evil = "".join(f"{text} \n" for text in controls) + f"{GUARD}<\\u003cthink\\u003e"
    harmless, counted = "harmless", 0
    for place, wrap in _places(family):
        plain, typed = (_controls_of(family, *wrap(text)) for text in (harmless, evil))
        if plain is None and typed is None:
            continue
        counted += 1
        if plain != typed:
            raise Failed(f"control strings in {place} give {typed} instead of {plain}")
    return f"{len(controls)} control strings, {counted} places"


def _places(
    family: TokenizedFamily,
) -> Iterator[tuple[str, Callable[[str], tuple[list[Message], Sequence[ToolSpec]]]]]:
    """Everywhere that foreign text gets into a prompt."""
    said = Message(role="assistant", content="a")

    def spec(text: str) -> ToolSpec:
        schema = {"type": "object", "properties": {"p": {"type": "string", "description": text, "enum": [text]}}}
        return ToolSpec(name="run", description=text, parameters=json.dumps(schema))

    def call(text: str, *, escaped: bool) -> Message:
        arguments = json.dumps({"p": text}, ensure_ascii=False)
        if escaped:
            arguments = arguments.replace("<", "\\u003c")
        return Message(role="assistant", tool_calls=(ToolCall(f"id{text}", "run", arguments),))

    yield "user", lambda text: ([Message(role="user", content=text)], ())
    if family._takes_system:
        yield "system", lambda text: ([Message(role="system", content=text), USER], ())
    yield "assistant", lambda text: ([USER, Message(role="assistant", content=text), USER], ())
    yield "reasoning", lambda text: ([USER, Message(role="assistant", content="a", reasoning=text), USER], ())
    yield (
        "tool result",
        lambda text: (
            [
                USER,
                Message(role="assistant", tool_calls=CALLS[:1]),
                Message(role="tool", content=text, tool_call_id=CALLS[0].id, name="run"),
            ],
            TOOLS,
        ),
    )
    yield (
        "call id",
        lambda text: (
            [USER, call(text, escaped=False), Message(role="tool", content="r", tool_call_id=f"id{text}", name=text)],
            TOOLS,
        ),
    )
    yield "arguments", lambda text: ([USER, call(text, escaped=False), said, USER], TOOLS)
    yield "escaped arguments", lambda text: ([USER, call(text, escaped=True), said, USER], TOOLS)
    yield "tool list", lambda text: ([USER], (spec(text),))


def _controls_of(family: TokenizedFamily, messages: list[Message], tools: Sequence[ToolSpec]) -> list[int] | None:
    try:
        ids = family.render_prompt(messages, tools)
    except BadRequest:
        return None
    return [token for token in ids.tolist() if token in family.tokenizer.control_ids]


def _two_results(subject: Subject) -> str:
    reply, rest = subject.both_called()
    added = subject.extend(reply.sampled, RESULTS, reply=reply.message)
    if added is not None and added != rest:
        raise Failed(f"two results give {added}, a whole rendering has {rest}")
    return "branch" if added is None else "together, as a whole rendering has them"


def _result_order(subject: Subject) -> str:
    reply, _ = subject.both_called()
    swapped = RESULTS[::-1]
    one, two = (subject.extend(reply.sampled, swapped, reply=reply.message) for _ in range(2))
    if one != two:
        raise Failed(f"the same order gives {one} and {two}")
    if one is None:
        return "branch"
    text = text_of(subject.family, one)
    first, second = (text.find(message.content) for message in swapped)
    if not 0 <= first < second:
        raise Failed(f"results sent second, first are rendered otherwise: {one}")
    return "in the order of the request"


def _few_shot(subject: Subject) -> str:
    ids = subject.family.render_prompt([USER, Message(role="assistant", content="written by hand"), USER], ())
    if "written by hand" not in text_of(subject.family, ids.tolist()):
        raise Failed(f"an assistant message of the harness is not in the prompt: {ids.tolist()}")
    return "context"


def _partial_character(subject: Subject) -> str:
    family = subject.tokenized
    whole = subject.encode("a")
    parts = (b"\xe2\x82", b"\xe2")
    cut = next(
        ([token] for part in parts for token in range(family.vocab_size) if family.token_bytes(token) == part), None
    )
    if cut is None:
        raise NotApplicable("no id of this vocabulary is a part of a character")
    verdict = subject.read([*subject.specimens.thought, *whole, *cut])
    if verdict.content != "a\ufffd":
        raise Failed(f"{[*whole, *cut]} reads {verdict.content!r}")
    return subject.same_suffix([*whole, *cut], subject.encode("a\ufffd"))


def _normalisation(subject: Subject) -> str:
    family = subject.tokenized
    shown = family.tokenizer.decode(subject.encode("e\u0301"))
    if shown not in ("e\u0301", "\u00e9"):
        raise Failed(f"e and a combining accent become {shown!r}")
    return "NFC-normalised" if shown == "\u00e9" else "as sent"


def _lone_surrogate(subject: Subject) -> str:
    try:
        subject.family.render_prompt([Message(role="user", content="\ud800")], ())
    except BadRequest:
        return "refused"
    except TollwayError as error:
        raise Failed(f"a lone surrogate gives {type(error).__name__}, not a bad request") from error
    raise Failed("a lone surrogate is rendered")


def _blanks(subject: Subject) -> str:
    sampled = subject.encode("\n\nB \n")
    return subject.same_suffix(sampled, subject.encode("B"))


def _empty_reply(subject: Subject) -> str:
    end = subject.answered()[0].sampled[-1]
    verdict = subject.read([end])
    if verdict.content or verdict.calls or verdict.reasoning:
        raise Failed(f"[{end}] reads {verdict}")
    if subject.extend([end], TAILS[0][1], reply=Message(role="assistant")) is None:
        return "one id, no content; then a branch"
    return "one id, no content"


def _one_bos(subject: Subject) -> str:
    family = subject.tokenized
    ids = subject.specimens.prompt.tolist()
    if ids[0] == ids[1] and ids[0] in family.tokenizer.control_ids:
        raise Failed(f"the prompt begins with {ids[:2]}")
    if found := family.tokenizer.control_ids.intersection(family.tokenizer.encode("hello")):
        raise Failed(f"the tokenizer adds {sorted(found)} to text")
    return f"begins with {ids[0]}"


def _broken_call(subject: Subject) -> str:
    reply, _ = subject.called()
    family = subject.family
    for cut in range(len(reply.sampled) - 1, 0, -1):
        ids = list(reply.sampled[:cut])
        if not subject.read(ids).calls:
            text = text_of(family, [token for token in ids if token not in family.stop_ids])
            verdict = subject.read(ids)
            if verdict.content and verdict.content[-12:] not in text:
                raise Failed(f"{ids} reads {verdict.content!r}, which is not what was written")
            if not verdict.content and not verdict.reasoning:
                raise Failed(f"{ids} loses its text: {verdict}")
            return "text"
    raise NotApplicable("a call cannot be cut here")


def token_cases() -> Iterator[tuple[int, str, Check]]:
    """(row of the token cases, title, check) of every row that a family has a part in."""
    yield 1, "a word in two pieces", _drift("Pant", "om")
    yield 2, "two newlines", _drift("x\n", "\n")
    yield 3, "a newline behind thinking", _after_think
    yield 4, "letter by letter", _drift("h", "e", "l", "l", "o")
    yield 5, "what the template wants behind a sampled end", _sampled_end
    yield 6, "a reply cut by length is closed", _cut_by_length
    yield 7, "a stop string cuts text, no id", _stop_string
    yield 8, "an end that opens another turn", _other_ends
    yield 9, "thinking stays in the history", _thinking_kept
    yield 10, "an answer without thinking stays as it was", _sampled_end
    yield 11, "the thinking switch acts on the suffix", _thinking_switch
    yield 17, "foreign text gives no control id", _foreign_text
    yield 18, "two tool results", _two_results
    yield 19, "tool results out of order", _result_order
    yield 24, "an assistant message of the harness", _few_shot
    yield 28, "a character cut in the middle", _partial_character
    yield 29, "combining characters", _normalisation
    yield 30, "a lone surrogate", _lone_surrogate
    yield 31, "blanks around a reply", _blanks
    yield 32, "an empty reply", _empty_reply
    yield 37, "one BOS", _one_bos
    yield 38, "a malformed call", _broken_call
