"""Every name of uvicorn, FastAPI, Starlette and CPython that promises nothing and that the server relies on.

All are needed: the server speaks HTTP through them. Nothing is imported here; names are strings. What stands in a list
like this, and how it is checked, is engine/compat.py's.
"""

from __future__ import annotations

from engine.compat import Finding, ForeignName, Sources
from engine.compat import missing as _missing

_PROTOCOL = "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol"
_CYCLE = "uvicorn.protocols.http.httptools_impl.RequestResponseCycle"


def _uvicorn(name: str, why: str, parameters: str | None = None, *, overridden: bool = False) -> ForeignName:
    known = None if parameters is None else tuple(parameters.split())
    return ForeignName(name, "needed", "http", why, "uvicorn 0.54", "No request is answered.", known, overridden)


def _fastapi(name: str, why: str, parameters: str | None = None, since: str = "FastAPI 0.136") -> ForeignName:
    known = None if parameters is None else tuple(parameters.split())
    without = "Routes that answer a model's work cannot be called."
    return ForeignName(name, "needed", "routes", why, since, without, known)


def _python(name: str, why: str, parameters: tuple[str, ...] | None = None) -> ForeignName:
    return ForeignName(name, "needed", "patterns", why, "Python 3.11", "`import server.app` fails.", parameters)


NAMES: tuple[ForeignName, ...] = (
    _uvicorn(f"{_PROTOCOL}.connection_made", "overridden: limits on time begin", "transport", overridden=True),
    _uvicorn(f"{_PROTOCOL}.connection_lost", "overridden: every request learns of it", "exc", overridden=True),
    _uvicorn(f"{_PROTOCOL}.data_received", "overridden: heads are limited", "data", overridden=True),
    _uvicorn(f"{_PROTOCOL}.on_message_begin", "overridden, likewise", "", overridden=True),
    _uvicorn(f"{_PROTOCOL}.on_url", "overridden, likewise", "url", overridden=True),
    _uvicorn(f"{_PROTOCOL}.on_header", "overridden, likewise", "name value", overridden=True),
    _uvicorn(f"{_PROTOCOL}.on_headers_complete", "overridden, likewise", "", overridden=True),
    _uvicorn(f"{_PROTOCOL}.on_message_complete", "overridden, likewise", "", overridden=True),
    _uvicorn(
        f"{_PROTOCOL}.pause_writing", "overridden: a client that reads nothing has limited time", "", overridden=True
    ),
    _uvicorn(f"{_PROTOCOL}.resume_writing", "overridden, likewise", "", overridden=True),
    _uvicorn(f"{_PROTOCOL}.on_response_complete", "overridden, likewise", "", overridden=True),
    _uvicorn(f"{_PROTOCOL}.timeout_keep_alive_handler", "overridden, likewise", "", overridden=True),
    _uvicorn(f"{_PROTOCOL}.timeout_keep_alive_task", "whether the connection was idle"),
    _uvicorn(f"{_PROTOCOL}.timeout_keep_alive", "for how long it may be"),
    _uvicorn(f"{_PROTOCOL}.send_400_response", "overridden: our own errors", "msg", overridden=True),
    _uvicorn(f"{_PROTOCOL}.cycle", "the newest request of a connection"),
    _uvicorn(f"{_PROTOCOL}.transport", "to close it"),
    _uvicorn(f"{_PROTOCOL}.loop", "for timers"),
    _uvicorn(f"{_PROTOCOL}.config", "leads to the app"),
    _uvicorn(f"{_CYCLE}.transport", "replaced: what is sent in one go leaves in one write"),
    _uvicorn(f"{_CYCLE}.receive", "the body", ""),
    _uvicorn(f"{_CYCLE}.message_event", "whether the body has come; set when the client has left"),
    _uvicorn(f"{_CYCLE}.more_body", "whether there is more of it"),
    _uvicorn(f"{_CYCLE}.chunked_encoding", "whether a piece can be written past `send`"),
    _uvicorn(f"{_CYCLE}.flow", "leads to the two below"),
    _uvicorn("uvicorn.protocols.http.flow_control.FlowControl.write_paused", "whether the client keeps up"),
    _uvicorn("uvicorn.protocols.http.flow_control.FlowControl.resume_reading", "to notice a client that leaves", ""),
    _uvicorn(f"{_CYCLE}.disconnected", "set when the client has left"),
    _uvicorn(f"{_CYCLE}.response_started", "whether an error can still be sent"),
    _uvicorn(f"{_CYCLE}.response_complete", "whether a request has been answered"),
    _fastapi("fastapi.routing.APIRoute.dependant", "what a route asks for"),
    _fastapi("fastapi.routing.APIRoute.body_field", "its body"),
    _fastapi("fastapi.routing.APIRoute.get_route_handler", "overridden: bodies are strict JSON", ""),
    _fastapi("fastapi.dependencies.models.Dependant.dependencies", "the key is checked before the body is read"),
    _fastapi("fastapi.dependencies.models.Dependant.call", "likewise"),
    _fastapi("starlette.requests.Request._body", "set: the body is read once", since="Starlette 1.10"),
    _fastapi("starlette.requests.Request._json", "set: and parsed once", since="Starlette 1.10"),
    _python("re._parser.parse", "reads a pattern, to measure it before it is compiled", ("str",)),
    _python("re._constants", "the parts of a pattern"),
)


def find(name: str) -> ForeignName:
    """Return the entry of a dotted name. Raises `KeyError`."""
    return {each.name: each for each in NAMES}[name]


def missing(sources: Sources | None = None) -> list[Finding]:
    """List which names are gone or take other parameters: of what is installed, or of other `sources`."""
    return _missing(NAMES, sources or Sources())
