"""Every name of uvicorn, FastAPI, Starlette and CPython that the server uses and that is not stable API.

All are needed: the server speaks HTTP through them. Nothing is imported here; names are strings. engine/compat.py says
what belongs in such a list, and checks it.
"""

from engine.compat import ForeignName

_PROTOCOL = "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol"
_CYCLE = "uvicorn.protocols.http.httptools_impl.RequestResponseCycle"
_DEPENDANT = "fastapi.dependencies.models.Dependant"


# By package: what of ours relies on it, since which version, and what happens without.
_PACKAGES = {
    "uvicorn": ("http", "uvicorn 0.54", "No request is answered."),
    "fastapi": ("routes", "FastAPI 0.136", "Bodies are not read as strict JSON."),
    "starlette": ("routes", "Starlette 1.10", "Bodies are not read as strict JSON."),
    "re": ("patterns", "Python 3.11", "`import server.app` fails."),
}


def _needed(name: str, why: str, parameters: str | None = None, *, overridden: bool = False) -> ForeignName:
    known = None if parameters is None else tuple(parameters.split())
    patch, since, without = _PACKAGES[name.partition(".")[0]]
    return ForeignName(name, "needed", patch, why, since, without, known, overridden)


NAMES: tuple[ForeignName, ...] = (
    _needed(f"{_PROTOCOL}.connection_made", "overridden: limits on time begin", "transport", overridden=True),
    _needed(f"{_PROTOCOL}.connection_lost", "overridden: every request learns of it", "exc", overridden=True),
    _needed(f"{_PROTOCOL}.data_received", "overridden: heads are limited", "data", overridden=True),
    _needed(f"{_PROTOCOL}.on_message_begin", "overridden, likewise", "", overridden=True),
    _needed(f"{_PROTOCOL}.on_header", "overridden, likewise", "name value", overridden=True),
    _needed(f"{_PROTOCOL}.on_headers_complete", "overridden, likewise", "", overridden=True),
    _needed(f"{_PROTOCOL}.on_message_complete", "overridden, likewise", "", overridden=True),
    _needed(f"{_PROTOCOL}.timeout_keep_alive_handler", "overridden: a slow client gets all of it", "", overridden=True),
    _needed(f"{_PROTOCOL}.timeout_keep_alive_task", "whether the connection was idle"),
    _needed(f"{_PROTOCOL}.timeout_keep_alive", "for how long it may be"),
    _needed(f"{_PROTOCOL}.send_400_response", "overridden: our own errors", "msg", overridden=True),
    _needed(f"{_PROTOCOL}.url", "to measure a head"),
    _needed(f"{_PROTOCOL}.headers", "likewise"),
    _needed(f"{_PROTOCOL}.cycle", "the newest request of a connection"),
    _needed(f"{_PROTOCOL}.transport", "to close it"),
    _needed(f"{_PROTOCOL}.loop", "for timers"),
    _needed(f"{_PROTOCOL}.config", "leads to the app"),
    _needed(f"{_CYCLE}.transport", "written to, past `send`"),
    _needed(f"{_CYCLE}.message_event", "set when the client has left"),
    _needed(f"{_CYCLE}.chunked_encoding", "whether a piece can be written past `send`"),
    _needed(f"{_CYCLE}.expected_content_length", "set: a body without chunks ends with its connection"),
    _needed(f"{_CYCLE}.flow", "leads to the two below"),
    _needed("uvicorn.protocols.http.flow_control.FlowControl.write_paused", "whether the client keeps up"),
    _needed("uvicorn.protocols.http.flow_control.FlowControl.resume_reading", "to notice a client that leaves", ""),
    _needed(f"{_CYCLE}.disconnected", "set when the client has left"),
    _needed(f"{_CYCLE}.response_started", "whether an error can still be sent"),
    _needed(f"{_CYCLE}.response_complete", "whether a request has been answered"),
    _needed("fastapi.routing.APIRoute.dependant", "leads to the key that a route asks for"),
    _needed(f"{_DEPENDANT}.dependencies", "likewise"),
    _needed(f"{_DEPENDANT}.call", "likewise"),
    _needed("fastapi.routing.APIRoute.body_field", "whether a route has a body"),
    _needed("fastapi.routing.APIRoute.get_route_handler", "overridden: bodies are strict JSON", ""),
    _needed("starlette.requests.Request._body", "set: the body is read once"),
    _needed("starlette.requests.Request._json", "set: and parsed once"),
    _needed("re._parser.parse", "reads a pattern, to measure it before it is compiled", "str"),
    _needed("re._constants", "the parts of a pattern"),
)
