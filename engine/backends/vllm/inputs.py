"""From texts to the tokens that a model for embeddings or reranking reads, within what it can read. Blocking."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ContextLengthError, RequestError

# Of a token at most, in ordinary text: what is longer than all tokens together is not even tokenised.
_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Input:
    """Token ids; of a pair, at which of them its second part begins, where the model wants to know."""

    ids: list[int]
    second: int | None = None


class Inputs:
    """Makes the inputs of one model. `check_ids` raises `RequestError` for tokens that the model does not have."""

    def __init__(self, tokenizer: Any, longest: int, check_ids: Callable[[Sequence[int], str], None]) -> None:
        self._tokenizer, self._longest, self._check_ids = tokenizer, longest, check_ids
        self._has_types = "token_type_ids" in tokenizer.model_input_names
        alone = tokenizer.encode("a", add_special_tokens=False)
        marked = tokenizer.encode("a")  # and from now on no limit is set that its file may have brought
        at = next(at for at in range(len(marked)) if marked[at : at + len(alone)] == alone)
        self._ending = marked[at + len(alone) :]

    def of_texts(self, given: Sequence[str | Sequence[int]], prefix: str, *, truncate: bool) -> list[Input]:
        """Return the inputs of texts, with `prefix` before each, and of token ids, which are taken as they are.

        Raises `RequestError`, naming the input, for one that is too long, if it is not to be cut.
        """
        texts = {}
        for at, one in enumerate(given):
            field = "input" if len(given) == 1 else f"input[{at}]"
            if isinstance(one, str):
                texts[at] = self._within_sight(prefix + one, field, truncate=truncate)
            else:
                self._check_ids(one, field)
        read = self._tokenizer(list(texts.values()))["input_ids"] if texts else []
        found = dict(zip(texts, read, strict=True))
        made = []
        for at, one in enumerate(given):
            field = "input" if len(given) == 1 else f"input[{at}]"
            made.append(Input(self._fitting(found.get(at) or list(one), field, truncate=truncate)))
        return made

    def of_pairs(self, query: str, documents: Sequence[str], *, truncate: bool) -> list[Input]:
        """Return the inputs of a query with each document; of one that is too long the document may be cut."""
        half = self._longest // 2
        if len(query) > half * _CHARACTERS or len(self._tokenizer.encode(query)) > half:
            raise ContextLengthError(
                f"This model's maximum context length is {self._longest} tokens, and a query may take half of it. "
                "Shorten the query.",
                param="query",
            )
        fields = [f"documents[{at}]" for at in range(len(documents))]
        seen = [self._within_sight(one, at, truncate=truncate) for one, at in zip(documents, fields, strict=True)]
        read = self._tokenizer([query] * len(seen), seen)
        made = []
        for at, field in enumerate(fields):
            ids, second = self._fitting(read["input_ids"][at], field, truncate=truncate), None
            if self._has_types:
                types = read["token_type_ids"][at]
                second = types.index(1) if 1 in types else len(types)
            made.append(Input(ids, second))
        return made

    def _within_sight(self, text: str, field: str, *, truncate: bool) -> str:
        most = self._longest * _CHARACTERS
        if len(text) <= most:
            return text
        if truncate:
            return text[:most]
        raise self._too_long("far more", field)

    def _fitting(self, ids: list[int], field: str, *, truncate: bool) -> list[int]:
        if not ids:
            raise RequestError(f"`{field}` has nothing that this model reads.", param=field)
        if len(ids) <= self._longest:
            return ids
        if not truncate:
            raise self._too_long(f"{len(ids)} tokens", field)
        return ids[: self._longest - len(self._ending)] + self._ending

    def _too_long(self, has: str, field: str) -> ContextLengthError:
        return ContextLengthError(
            f"This model's maximum context length is {self._longest} tokens. However, `{field}` has {has}. Shorten it, "
            "or send `truncate: true`.",
            param=field,
        )
