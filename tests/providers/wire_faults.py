"""Faults on the wire for the stand-ins: what the next matching requests get instead of, or after, an answer."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Fault:
    """One plan. Matching requests use it up."""

    method: str
    path: str
    status: int | None = 500
    """``None``: the right answer, only later."""
    times: int = 1
    delay_s: float = 0.0
    late: bool = False
    """The request is carried out first; only its answer is lost."""
    headers: dict[str, str] = field(default_factory=dict)
    hits: int = 0

    def matches(self, method: str, path: str) -> bool:
        return self.hits < self.times and method == self.method and re.fullmatch(self.path, path) is not None

    async def answer(self) -> web.Response | None:
        self.hits += 1
        await asyncio.sleep(self.delay_s)
        if self.status is None:
            return None
        body = {"code": self.status, "statusCode": self.status, "message": f"planned {self.status}"}
        return web.json_response(body, status=self.status, headers=self.headers)


@dataclass
class Faults:
    """The plans of one stand-in."""

    plans: list[Fault] = field(default_factory=list)

    def plan(self, method: str, path: str, status: int | None = 500, **more: object) -> Fault:
        fault = Fault(method, path, status, **more)  # type: ignore[arg-type]
        self.plans.append(fault)
        return fault

    async def strike(self, method: str, path: str) -> web.Response | None:
        for fault in self.plans:
            if not fault.late and fault.matches(method, path):
                return await fault.answer()
        return None

    async def after(self, method: str, path: str) -> web.Response | None:
        for fault in self.plans:
            if fault.late and fault.matches(method, path):
                return await fault.answer()
        return None
