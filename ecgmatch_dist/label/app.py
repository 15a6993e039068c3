"""The page of `ecgmatch label`: one ECG, keys, and what the answers have come to. All state is in the session."""

from contextlib import suppress
from functools import lru_cache
from threading import Lock
from typing import Any, TypeGuard

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ecgmatch_dist.data.labels import UNKNOWN
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.forecast import Range, sentence
from ecgmatch_dist.label.agreement import FEW, agreements
from ecgmatch_dist.label.answers import Labels
from ecgmatch_dist.label.chain import LEAST
from ecgmatch_dist.label.draw import picture
from ecgmatch_dist.label.session import EVERY, Session
from ecgmatch_dist.predict.flags import sentences
from ecgmatch_dist.web.server import assets

MORE = 50
"""Labels that the forecast is about."""
DAY = 86400.0
DRAWN = 16
"""Pictures that are kept: the next one, and some to go back to."""


class Page:
    """Answers the requests of the page, as JSON."""

    def __init__(self, session: Session, commands: list[str]) -> None:
        self.session, self.commands = session, commands
        self._drawn = lru_cache(DRAWN)(self._draw)
        self._drawing = Lock()

    def routes(self) -> list[Route]:
        files = assets("ecgmatch_dist.label", "page.js", "page.css", "page.html")
        front = Route("/", files[-1].endpoint)
        return [
            front,
            *files[:-1],
            Route("/api/question", self.question),
            Route("/api/answer", self.answer, methods=["POST"]),
            Route("/api/undo", self.undo, methods=["POST"]),
            Route("/api/check", self.check, methods=["POST"]),
            Route("/api/train", self.train, methods=["POST"]),
            Route("/api/state", self.state),
            Route("/api/alike", self.alike),
            Route("/labels.csv", self.table),
        ]

    def question(self, request: Request) -> Response:
        """The next recording, or with ?back=k the k-th last one that was answered, with its answer."""
        back = number(request.query_params.get("back", "0"))
        return JSONResponse(self.asked(back), background=None if back else BackgroundTask(self.prepare))

    def asked(self, back: int = 0) -> dict[str, Any]:
        """The question as the page wants it."""
        session = self.session
        history = session.history()
        if back:
            recording, why = history[-min(back, len(history))] if history else "", "again"
        else:
            asked = session.question()
            recording, why = (asked.recording, asked.why) if asked else ("", "")
        if not recording:
            return {"recording": "", "back": 0, "history": len(history)}
        given = session.answers.standing(session.wishes.reader).get(recording)
        shown = given if given and why == "again" else None
        svg, limbs = self.draw(recording)
        about = self.about(recording)
        age, sex = about["age"], {"Male": "man", "Female": "woman"}.get(about["sex"], "")
        return {
            "recording": recording,
            "why": why,
            "svg": svg,
            "limbs": limbs,
            "about": ", ".join(text for text in (sex, f"{age} years" if age else "") if text),
            "flags": [text for text, warning in sentences(about["flags"].split()) if warning],
            "answer": {"classes": shown.classes, "unsure": shown.unsure} if shown else None,
            "back": min(back, len(history)),
            "history": len(history),
        }

    def draw(self, recording: str) -> tuple[str, bool]:
        """The picture of `_draw`. One at a time: whoever asks for what is being drawn ahead waits for it."""
        with self._drawing:
            return self._drawn(recording)

    def prepare(self) -> None:
        """Choose and draw the next recording while the reader looks at this one."""
        with suppress(UserError, OSError):  # the question itself will tell
            if ahead := self.session.look_ahead():
                self.draw(ahead.recording)

    async def answer(self, request: Request) -> Response:
        value = await body(request)
        yes, unsure = value.get("classes"), value.get("unsure")
        recording, why, seconds = value.get("recording"), value.get("why"), value.get("seconds")
        if not isinstance(recording, str) or not isinstance(why, str) or not isinstance(seconds, int | float):
            raise UserError("an answer has a recording, a reason and seconds")
        if not (is_names(yes) and is_names(unsure)):
            raise UserError("an answer has two lists of classes")
        time = float(min(max(seconds, 0), DAY))  # JSON takes whole numbers that no float holds
        await run_in_threadpool(self.session.answer, recording, yes, unsure, time, why[:40])
        following = await run_in_threadpool(self.asked)  # with the same answer: one request less to wait for
        return JSONResponse({"saved": recording, "next": following}, background=BackgroundTask(self.prepare))

    def undo(self, _: Request) -> Response:
        return JSONResponse({"recording": self.session.undo()})

    def check(self, _: Request) -> Response:
        """Ask next about the labels that the model doubts."""
        return JSONResponse({"doubts": self.session.check()})

    async def train(self, request: Request) -> Response:
        """Train the chain on all answers; with {"stop": true}, stop it."""
        session = self.session
        if (await body(request)).get("stop") and session.chain:
            await run_in_threadpool(session.chain.end)
        else:
            await run_in_threadpool(session.train)
        return JSONResponse(self.training())

    def training(self) -> dict[str, Any] | None:
        """The chain: what is under way, and what earlier ones have reached; None: it cannot be trained from here."""
        if (chain := self.session.chain) is None:
            return None
        reached = [
            {"answers": one.answers, "run": one.run, "map": _numbers(one.map) if one.map else None}
            for one in chain.reached()
        ]
        return {**vars(chain.state), "line": chain.last_line(), "reached": reached, "least": LEAST}

    def state(self, _: Request) -> Response:
        """Everything beside the ECG."""
        session = self.session
        with session.lock:
            common = session.answers.common()
            return JSONResponse(
                {
                    "reader": session.wishes.reader,
                    "mine": len(session.history()),
                    "answered": len(common),
                    "recordings": len(session.ids),
                    "seconds": session.seconds(),
                    "classes": self.counts(list(common.values())),
                    "normal": session.scheme.normal,
                    "measured": session.features.done,
                    "model": self.model(len(common)),
                    "doubts": len(session.doubts()),
                    "training": self.training(),
                    "agreement": self.agreement(),
                    "warning": session.warning,
                    "commands": self.commands,
                    "table": session.to.name,
                    "random": session.wishes.random,
                }
            )

    def counts(self, labels: list[Labels]) -> list[dict[str, Any]]:
        scheme = self.session.scheme
        return [
            {
                "short": short,
                "name": name,
                "yes": sum(int(label[c] == 1) for label in labels),
                "unknown": sum(int(label[c] == UNKNOWN) for label in labels),
            }
            for c, (short, name) in enumerate(zip(scheme.short, scheme.classes, strict=True))
        ]

    def model(self, answered: int) -> dict[str, Any]:
        grown = self.session.grown
        left = EVERY - answered % EVERY
        if grown is None or not grown.curve:
            return {"curve": [], "words": "", "left": max(left, 20 - answered), "flat": False}
        fit, n = grown.fit, grown.curve[-1][0]
        points = [[size, at.value, at.low, at.high] for size, at in grown.curve]
        ahead = [[n + more, *_numbers(fit.score(n + more))] for more in (0, MORE // 2, MORE)] if fit else []
        return {
            "curve": points,
            "ahead": ahead,
            "words": sentence(fit, n, MORE),
            "flat": bool(fit and fit.flat(n, MORE)),
            "left": left,
            "kind": grown.model,
        }

    def agreement(self) -> list[dict[str, Any]]:
        return [
            {
                "readers": one.readers,
                "name": one.name,
                "recordings": one.recordings,
                "both": one.both,
                "one": one.one,
                "kappa": one.kappa,
                "few": one.recordings < FEW,
            }
            for one in agreements(self.session.answers)
        ]

    def alike(self, request: Request) -> Response:
        """The nearest answered recordings, with pictures."""
        recording = request.query_params.get("recording", "")
        codes = self.session.answers.codes
        found = [
            {"recording": name, "distance": away, "codes": codes(label), "svg": self.draw(name)[0]}
            for name, away, label in self.session.alike(recording)
        ]
        return JSONResponse(found)

    def table(self, _: Request) -> Response:
        with self.session.lock:
            text = self.session.answers.table()
        return Response(text, media_type="text/csv; charset=utf-8")

    def about(self, recording: str) -> dict[str, str]:
        """What the manifest says of the recording."""
        store, row = self.session.store, self.session.store_rows[[self.session.row_of[recording]]]
        database = int(store.database_of(row)[0])
        own = row - store.starts[database]
        return {name: store.tables[database].texts(name, own)[0] for name in ("age", "sex", "flags")}

    def _draw(self, recording: str) -> tuple[str, bool]:
        session = self.session
        row = session.store_rows[session.row_of[recording]]
        return picture(session.store.read(row[None])[0], session.store.rate, recording)


def _numbers(at: Range) -> list[float]:
    return [at.value, at.low, at.high]


def is_names(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 9 else 0


async def body(request: Request) -> dict[str, Any]:
    try:
        value = await request.json()
    except (ValueError, RecursionError):
        raise UserError("the request is not JSON") from None
    if not isinstance(value, dict):
        raise UserError("the request is not an object")
    return value
