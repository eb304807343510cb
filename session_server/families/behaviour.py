"""What a family must do beside the token cases: append only, lose no message, stream what it parses.

Depends on ``subject``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from tollway.errors import BadRequest
from tollway.messages import Message, ToolCall, ToolSpec
from tollway.session_server.families.base import ParsedReply, RenderOptions
from tollway.session_server.families.specimens import CALLS, RESULTS, TAILS, USER, array
from tollway.session_server.families.specimens import nasty_texts as nasty
from tollway.session_server.families.subject import Check, Failed, NotApplicable, Subject, text_of
from tollway.session_server.families.tokenized import TokenizedFamily
from tollway.session_server.tokens import CORPUS

__all__ = ["BEHAVIOUR"]


def _append_only(subject: Subject) -> str:
    """Every tail behind every kind of reply, whole and cut: the diff of whole renderings, a branch, or a refusal."""
    user, system = TAILS[0][1], TAILS[2][1]
    replies = (
        (Message(role="assistant", content="ok then"), tuple(tail for _, tail in TAILS)),
        (
            Message(role="assistant", tool_calls=CALLS[:1]),
            (RESULTS[:1], (*RESULTS[:1], *user), (*RESULTS[:1], *system)),
        ),
        (Message(role="assistant", tool_calls=CALLS), (RESULTS, (*RESULTS, *user))),
    )
    seen = {"appended": 0, "branch": 0, "refused": 0}
    for message, tails in replies:
        for new in tails:
            for ended in (True, False):
                seen[_one_tail(subject, message, new, ended=ended)] += 1
    return ", ".join(f"{count} {what}" for what, count in seen.items() if count)


def _one_tail(subject: Subject, message: Message, new: Sequence[Message], *, ended: bool) -> str:
    roles = " ".join(each.role for each in new)
    label = f"{len(message.tool_calls)} calls, then {roles}, {'stop' if ended else 'length'}"
    made = subject.specimens.reply(label, message, new)
    sampled = made[0].sampled if made is not None else subject.answered()[0].sampled
    try:
        added = subject.extend(
            sampled if ended else sampled[:-1], new, reply=message, finish="stop" if ended else "length"
        )
    except BadRequest as error:
        if made is None:
            return "refused"
        if not any(role in str(error) for role in {"system", "developer"}.intersection(roles.split())):
            raise Failed(f"{label}: refused without naming a role: {error}") from error
        return "refused"
    if added is None or made is None:
        return "branch"
    rest = made[1]
    if ended and added != rest:
        raise Failed(f"{label}: behind {list(sampled)} come {added}, a whole rendering has {rest}")
    if not ended:
        subject.close_of(added, rest, sampled[-1])
    text = text_of(subject.family, added)
    if lost := [each.content for each in new if each.content not in text]:
        raise Failed(f"{label}: {lost} is not in {added}")
    return "appended"


def _roles_kept(subject: Subject) -> str:
    """Text of a role that the template does not know is in the prompt, or the role is refused by name."""
    said = []
    for role in ("system", "developer"):
        for place, messages in (
            ("first", [Message(role=role, content="SAY BANANA"), USER]),
            ("later", [USER, Message(role="assistant", content="a"), Message(role=role, content="SAY BANANA"), USER]),
        ):
            try:
                ids = subject.family.render_prompt(messages, subject.specimens.tools).tolist()
            except BadRequest as error:
                if role not in str(error):
                    raise Failed(f"{role} {place}: refused without naming it: {error}") from error
                said.append(f"{role} {place} refused")
                continue
            if "SAY BANANA" not in text_of(subject.family, ids):
                raise Failed(f"{role} {place}: not in the prompt {ids}")
    return ", ".join(said) or "all kept"


def _streams(subject: Subject) -> str:
    """A stream ends as the parse of the whole, cut anywhere."""
    count = 0
    for ids, stop in _replies(subject):
        whole = subject.read(ids, None, stop)
        cuts = [[at] for at in range(1, len(ids))] + [[1] * len(ids), [3] * len(ids)]
        for sizes in cuts:
            parser = subject.family.stream(
                subject.specimens.tools, prompt_end=subject.specimens.end, stop=(stop,) if stop else ()
            )
            deltas, at = [], 0
            for size in [*sizes, len(ids)]:
                deltas += parser.feed(ids[at : at + size])
                at += size
            deltas += parser.finish(whole)
            got = ParsedReply(
                "".join(each.content for each in deltas),
                "".join(each.reasoning for each in deltas) or None,
                tuple(each.call for each in deltas if each.call is not None),
            )
            if got != whole:
                raise Failed(f"{ids} cut at {sizes[:8]} streams {got}, the whole reads {whole}")
            count += 1
    return f"{count} streams"


def _replies(subject: Subject) -> Iterator[tuple[list[int], str | None]]:
    """Replies of all kinds: whole, cut, malformed, to a tool that was not offered, with controls in odd places."""
    for made in (
        subject.plain,
        subject.call,
        subject.specimens.reply("calls", Message(role="assistant", tool_calls=CALLS), RESULTS),
    ):
        if made is not None:
            ids = list(made[0].sampled)
            yield ids, None
            yield ids[: 2 * len(ids) // 3], None
            yield [*ids[:-1], *ids], None
    unknown = ToolCall("functions.nope:0", "nope", "{}")
    made = subject.specimens.reply("unknown", Message(role="assistant", tool_calls=(unknown,)), RESULTS[:1])
    if made is not None:
        yield list(made[0].sampled), None
    if not isinstance(subject.family, TokenizedFamily):
        return
    thought = list(subject.specimens.thought)
    yield [*thought, *subject.encode("<think>x</think><tool_call> é🙂 end")], None
    yield [*thought, *subject.encode("one two STOP three")], "STOP"
    draw = np.random.default_rng(0)
    controls = sorted(subject.family.tokenizer.control_ids)
    for text in nasty(12, seed=1):
        ids = subject.encode(text)
        yield [*thought, *ids[:9], int(draw.choice(controls)), *ids[9:20]], None


def _unknown_tool(subject: Subject) -> str:
    """A call to a tool that was not offered is text."""
    reply, _ = subject.called()
    others = (ToolSpec(name="other"),)
    verdict = subject.read(reply.sampled, others)
    if verdict.calls:
        raise Failed(f"{list(reply.sampled)} calls {verdict.calls[0].name}, which was not offered")
    if CALLS[0].name not in verdict.content:
        raise Failed(f"{list(reply.sampled)} loses the text of the call: {verdict}")
    return "text"


def _calls_read(subject: Subject) -> str:
    """What the family renders for a call, it reads back as that call."""
    reply, _ = subject.called()
    verdict = subject.read(reply.sampled)
    found = [(call.name, json.loads(call.arguments)) for call in verdict.calls]
    if found != [(CALLS[0].name, json.loads(CALLS[0].arguments))]:
        raise Failed(f"{list(reply.sampled)} reads {found}")
    return "as written"


def _primed_thinking(subject: Subject) -> str:
    """Text behind an opened thinking is reasoning; without thinking it is content."""
    family = subject.tokenized
    cut = subject.encode("abc")
    opened = bool(subject.specimens.thought)
    verdict = subject.read(cut)
    wanted = ("", "abc") if opened else ("abc", None)
    if (verdict.content, verdict.reasoning) != wanted:
        raise Failed(f"{cut} reads {verdict}")
    if not family.switch:
        return "reasoning" if opened else "content"
    closed = family.render_prompt([USER], (), RenderOptions(thinking=False))
    plain = family.parse(array(cut), (), prompt_end=closed[-64:])
    if plain.content != "abc":
        raise Failed(f"{cut} behind a prompt without thinking reads {plain}")
    return ("reasoning" if opened else "content") + "; content when switched off"


def _fast_encoder(subject: Subject) -> str:
    tokenizer = subject.tokenized.tokenizer
    if tokenizer.encoder != "fastokens":
        raise NotApplicable(f"{tokenizer.encoder} encodes")
    texts = [*CORPUS, *tokenizer.control, *nasty(600)]
    differs = tokenizer.fast_difference(texts)
    if differs is not None:
        raise Failed(f"fastokens encodes {differs!r} otherwise than tokenizers")
    return f"{len(texts)} texts"


def _decoding(subject: Subject) -> str:
    tokenizer = subject.tokenized.tokenizer
    draw = np.random.default_rng(0)
    for _ in range(400):
        ids = draw.integers(0, tokenizer.vocab_size, 12).tolist()
        if not tokenizer.decodes_as_the_library(ids):
            raise Failed(f"{ids} decodes otherwise than in tokenizers")
    return "400 sequences"


BEHAVIOUR: tuple[tuple[str, str, Check], ...] = (
    ("append-only", "every tail behind every reply", _append_only),
    ("roles", "no message is lost", _roles_kept),
    ("calls", "a rendered call reads back", _calls_read),
    ("unknown tool", "a call to a tool that was not offered", _unknown_tool),
    ("primed thinking", "reasoning and content are told apart", _primed_thinking),
    ("streaming", "a stream is the parse of the whole", _streams),
    ("encoder", "fastokens encodes as tokenizers", _fast_encoder),
    ("decoder", "bytes decode as in tokenizers", _decoding),
)
"""(name, title, check) of what is not one of the token cases."""
