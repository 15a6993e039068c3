"""A request -> the files in it, and what was said about them."""

from dataclasses import dataclass, field

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from ecgmatch_dist.files.plain import plain_line
from ecgmatch_dist.web.guard import Refused

MOST_FILES = 100
LONGEST_NAME = 200
HOW = "send files as a form, for example: curl -F file=@ecg.hea -F file=@ecg.dat"


@dataclass(frozen=True)
class Upload:
    """What a client sent. File names have no folders."""

    files: dict[str, bytes]
    said: dict[str, str] = field(default_factory=dict)
    """Fields of the form: rate, unit, leads."""


async def read_upload(request: Request) -> Upload:
    """The files of a multipart form; the fields of the form and of the query. Raises Refused."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Refused(415, HOW)
    try:
        async with request.form(max_files=MOST_FILES, max_fields=20) as form:
            files: dict[str, bytes] = {}
            said = dict(request.query_params)
            for name, value in form.multi_items():
                if isinstance(value, UploadFile):
                    files[safe_name(value.filename or "", files)] = await value.read()
                else:
                    said[name] = value
    except HTTPException as error:
        raise Refused(400, f"not a form of files: {plain_line(error.detail)} {HOW}") from None
    if not files:
        raise Refused(400, f"no files; {HOW}")
    return Upload(files, said)


def safe_name(name: str, taken: dict[str, bytes]) -> str:
    """The name without folders, as a browser or a program may send them. Raises Refused for what no file can be called."""
    short = name.replace("\\", "/").rpartition("/")[2]
    if not short.strip(". ") or len(short.encode()) > LONGEST_NAME or not short.isprintable():
        raise Refused(400, f"a file cannot be called {plain_line(name[:LONGEST_NAME])!r}")
    if short in taken:
        raise Refused(400, f"two files are called {short}: send them one after the other")
    return short
