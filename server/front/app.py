"""What a front answers itself, chat in all its conventions, with the parts and the middleware of the whole app.

Engine, limits and books are the lead's, and so is every other address.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

from server.app import bare_app
from server.dependencies import check_right
from server.drain import Drain
from server.front.forward import Forward
from server.front.messages import Ended
from server.front.remote_engine import RemoteEngine
from server.routes import chat, completions, messages, responses

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from server.access_log import RequestRecord
    from server.front.lead import Lead
    from server.front.messages import Model, Rights
    from server.live_keys import LiveKeys
    from server.settings import Settings
    from server.store import ApiKey


class FrontApp:
    """An ASGI app. `state` is what server/app.py keeps in its own, as far as a front has it."""

    def __init__(self, settings: Settings, keys: LiveKeys, rights: Rights, lead: Lead) -> None:
        self._own = bare_app(settings, (chat, messages, responses, completions))
        self._own_paths = {route.path for route in self._own.routes if hasattr(route, "path")}
        self._forward = Forward(lead)
        self.access = _Access(rights)
        self.state = self._own.state
        self.state.drain = self.drain = Drain()
        self.state.keys = keys
        self.state.access = self.access
        self.state.engine_for = partial(RemoteEngine, lead)
        self.state.access_log = SimpleNamespace(append=lambda record: _report(lead, record))
        self.state.metrics = SimpleNamespace(finished=lambda _: None)  # counted by the lead, together with the line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or leave it to the lead: also what is asked wrongly, so that it says the same as ever."""
        if scope["method"] == "POST" and scope["path"] in self._own_paths:
            await self._own(scope, receive, send)
        else:
            await self._forward(scope, receive, send)


class _Access:
    """As dependencies.py's, of what the lead has told."""

    def __init__(self, rights: Rights) -> None:
        self._rights = rights

    def use(self, rights: Rights) -> None:
        """From now on these are the models and tiers."""
        self._rights = rights

    def model(self, key: ApiKey, model: str) -> Model:
        """Return what is known of the model. Raises `ApiError` unless the key may use it."""
        self.check(key, model)
        return self._rights.models[model]

    def check(self, key: ApiKey, model: str) -> None:
        """Raise like `model`."""
        known = self._rights.models.get(model)
        check_right(key, model, None if known is None else known.tier, self._rights.tiers.get(key.tier, ()))


def _report(lead: Lead, record: RequestRecord) -> None:
    record.headers = {}  # the answer has them
    lead.say(Ended(record))
