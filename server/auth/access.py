"""What the key of a request may do: its scopes, and the models of its tier and of its own list.

The middleware finds the key.
"""

# No `from __future__ import annotations` here: FastAPI cannot resolve those of an object that is called.
from dataclasses import dataclass

from fastapi import Request

from engine import Engine, ModelInfo
from engine.config.messages import near_miss_sentence
from server.errors import ApiError
from server.store.keys import ApiKey


@dataclass(frozen=True)
class RequiresScope:
    """Base of dependencies that require a scope of the request's key."""

    scope: str

    def check(self, request: Request) -> ApiKey:
        """Return the key. Raises `ApiError` 403 if it lacks the scope."""
        key: ApiKey = request.state.key
        if self.scope not in key.scopes:
            sentence = f"This key lacks the scope `{self.scope}`. Ask your administrator for a key that has it."
            raise ApiError(403, "insufficient_permissions", sentence)
        return key


class KeyWith(RequiresScope):
    """A dependency that returns the request's key. Raises `ApiError` 403 if it lacks `scope`."""

    async def __call__(self, request: Request) -> ApiKey:
        return self.check(request)


class KeyIfSent(RequiresScope):
    """Like `KeyWith`, for paths that a setting may open: None if no key was sent."""

    async def __call__(self, request: Request) -> ApiKey | None:
        return None if request.state.key is None else self.check(request)


class Access:
    """Which models a key may use: those of its tier, and of its own list if it has one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def models(self, key: ApiKey) -> list[ModelInfo]:
        """Return the models that the key may use, in the order of models.yaml."""
        return [model for model in self.engine.models() if self._allows(key, model.id, model.tier)]

    def speech_models(self, key: ApiKey | None) -> list[ModelInfo]:
        """Return the speech models that the key may use; all of them if `key` is None."""
        models = self.engine.models() if key is None else self.models(key)
        return [model for model in models if "speech" in model.capabilities]

    def model(self, key: ApiKey, name: str) -> ModelInfo:
        """Return one model by id or alias. Raises like `model_id`."""
        model = self.model_id(key, name)
        return next(info for info in self.engine.models() if info.id == model)

    def model_id(self, key: ApiKey, name: str) -> str:
        """Return the id of the model of this name, an id or an alias.

        Raises `ApiError` 404, the same one for an unknown model and for one that the key may not use.
        """
        spec = self.engine.config.entry(name)
        if spec is None or not self._allows(key, spec.id, spec.tier):
            meant = near_miss_sentence(name, [model.id for model in self.models(key)])
            sentence = f"There is no such model, or your key may not use it.{meant}"
            advice = "GET /v1/models lists the ones that you may use."
            forbidden = None if spec is None else spec.id
            raise ApiError(404, "model_not_found", f"{sentence} {advice}", param="model", model=forbidden)
        return spec.id

    def _allows(self, key: ApiKey, model: str, tier: str) -> bool:
        config = self.engine.config
        own = config.tiers.get(key.tier)
        if own is None or tier not in own.models:
            return False
        if key.models is None or model in key.models:
            return True
        # The key may name the model by an alias, such as its former id.
        spec = config.entry(model)
        return spec is not None and any(alias in key.models for alias in spec.aliases)
