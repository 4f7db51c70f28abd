"""Every name of uvicorn, FastAPI, Starlette and CPython that promises nothing and that the server relies on.

All are needed: the server speaks HTTP through them. Nothing is imported here; names are strings. What belongs in such
a list, and how it is checked, is engine/compat.py's.
"""

from __future__ import annotations

from engine.compat import ForeignName

_PROTOCOL = "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol"
_CYCLE = "uvicorn.protocols.http.httptools_impl.RequestResponseCycle"
_DEPENDANT = "fastapi.dependencies.models.Dependant"


def _uvicorn(name: str, why: str, parameters: str | None = None, *, overridden: bool = False) -> ForeignName:
    known = None if parameters is None else tuple(parameters.split())
    return ForeignName(name, "needed", "http", why, "uvicorn 0.54", "No request is answered.", known, overridden)


def _fastapi(name: str, why: str, parameters: str | None = None, since: str = "FastAPI 0.136") -> ForeignName:
    known = None if parameters is None else tuple(parameters.split())
    without = "Bodies are not read as strict JSON."
    return ForeignName(name, "needed", "routes", why, since, without, known)


def _python(name: str, why: str, parameters: tuple[str, ...] | None = None) -> ForeignName:
    return ForeignName(name, "needed", "patterns", why, "Python 3.11", "`import server.app` fails.", parameters)


NAMES: tuple[ForeignName, ...] = (
    _uvicorn(f"{_PROTOCOL}.connection_made", "overridden: limits on time begin", "transport", overridden=True),
    _uvicorn(f"{_PROTOCOL}.connection_lost", "overridden: every request learns of it", "exc", overridden=True),
    _uvicorn(f"{_PROTOCOL}.data_received", "overridden: heads are limited", "data", overridden=True),
    _uvicorn(f"{_PROTOCOL}.on_message_begin", "overridden, likewise", "", overridden=True),
    _uvicorn(f"{_PROTOCOL}.on_header", "overridden, likewise", "name value", overridden=True),
    _uvicorn(f"{_PROTOCOL}.on_headers_complete", "overridden, likewise", "", overridden=True),
    _uvicorn(f"{_PROTOCOL}.on_message_complete", "overridden, likewise", "", overridden=True),
    _uvicorn(
        f"{_PROTOCOL}.timeout_keep_alive_handler", "overridden: a slow client gets all of it", "", overridden=True
    ),
    _uvicorn(f"{_PROTOCOL}.timeout_keep_alive_task", "whether the connection was idle"),
    _uvicorn(f"{_PROTOCOL}.timeout_keep_alive", "for how long it may be"),
    _uvicorn(f"{_PROTOCOL}.send_400_response", "overridden: our own errors", "msg", overridden=True),
    _uvicorn(f"{_PROTOCOL}.url", "to measure a head"),
    _uvicorn(f"{_PROTOCOL}.headers", "likewise"),
    _uvicorn(f"{_PROTOCOL}.cycle", "the newest request of a connection"),
    _uvicorn(f"{_PROTOCOL}.transport", "to close it"),
    _uvicorn(f"{_PROTOCOL}.loop", "for timers"),
    _uvicorn(f"{_PROTOCOL}.config", "leads to the app"),
    _uvicorn(f"{_CYCLE}.transport", "written to, past `send`"),
    _uvicorn(f"{_CYCLE}.message_event", "set when the client has left"),
    _uvicorn(f"{_CYCLE}.chunked_encoding", "whether a piece can be written past `send`"),
    _uvicorn(f"{_CYCLE}.flow", "leads to the two below"),
    _uvicorn("uvicorn.protocols.http.flow_control.FlowControl.write_paused", "whether the client keeps up"),
    _uvicorn("uvicorn.protocols.http.flow_control.FlowControl.resume_reading", "to notice a client that leaves", ""),
    _uvicorn(f"{_CYCLE}.disconnected", "set when the client has left"),
    _uvicorn(f"{_CYCLE}.response_started", "whether an error can still be sent"),
    _uvicorn(f"{_CYCLE}.response_complete", "whether a request has been answered"),
    _fastapi("fastapi.routing.APIRoute.dependant", "leads to the key that a route asks for"),
    _fastapi(f"{_DEPENDANT}.dependencies", "likewise"),
    _fastapi(f"{_DEPENDANT}.call", "likewise"),
    _fastapi("fastapi.routing.APIRoute.body_field", "whether a route has a body"),
    _fastapi("fastapi.routing.APIRoute.get_route_handler", "overridden: bodies are strict JSON", ""),
    _fastapi("starlette.requests.Request._body", "set: the body is read once", since="Starlette 1.10"),
    _fastapi("starlette.requests.Request._json", "set: and parsed once", since="Starlette 1.10"),
    _python("re._parser.parse", "reads a pattern, to measure it before it is compiled", ("str",)),
    _python("re._constants", "the parts of a pattern"),
)
