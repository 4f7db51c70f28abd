"""A model on vLLM that reads texts and answers with numbers: vectors of embeddings, scores of a reranker.

The inputs of a request are tokenised together, then each waits for its turn: a few at a time, so that a list of
thousands never blocks the queue. `AsyncLLM.encode` is public, and avoids the costs of vLLM's server per request.
"""

from __future__ import annotations

import asyncio
import importlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from engine.backends import together
from engine.backends.vllm.engine import WARM_UP, Launch, VllmAuxiliary, auxiliary_arguments, starting
from engine.backends.vllm.processes import EngineWatch
from engine.config import EmbeddingModelSpec, PoolingModelSpec, RerankModelSpec
from engine.config.yaml import shown
from engine.errors import ContextLengthError, GenerationError, LoadError, RequestError
from engine.stream import PoolingStream, Stream
from engine.types import EmbeddingRequest, Pooled, PoolingRequest, RerankRequest, Urgency
from engine.weights.layouts import VectorLayout, check_pooling_folder, read_layout
from engine.weights.safety import read_object

if TYPE_CHECKING:
    from torch import Tensor

MOST_TOKENS = 300_000  # of one request, as in the convention
_AT_ONCE = 64  # inputs of one request
_INTERACTIVE_INPUTS = 8  # the first ones of a request; the others wait behind those of other requests
# The most characters that a token has in ordinary text: a text with more than fit is not even tokenised.
_CHARACTERS = 64
_READ_CHARACTERS = 2**18  # that are tokenised in one go


@dataclass(frozen=True, slots=True)
class Input:
    """Token ids. `second`: the index at which the second part of a pair begins, if the model needs it."""

    ids: list[int]
    second: int | None = None


class Inputs:
    """Makes the inputs of one model. `check_ids` raises `RequestError` for tokens that the model does not have.

    `template` is put around a query and a text; None: the tokenizer marks pairs. Raises `LoadError` if it is too long.
    """

    def __init__(
        self,
        tokenizer: Any,
        longest: int,
        check_ids: Callable[[Sequence[int], str], None],
        template: str | None = None,
    ) -> None:
        self._tokenizer, self._longest, self._check_ids = tokenizer, longest, check_ids
        self._has_types = "token_type_ids" in tokenizer.model_input_names
        alone = tokenizer.encode("a", add_special_tokens=False)
        marked = tokenizer.encode("a")  # this also removes a length limit in the tokenizer's file
        at = next(at for at in range(len(marked)) if marked[at : at + len(alone)] == alone)
        self._ending = marked[at + len(alone) :]
        self._around: tuple[str, str, str] | None = None
        self._longest_query = longest // 2
        if template is not None:
            before, _, rest = template.partition("{query}")
            between, _, after = rest.partition("{document}")
            self._around = before, between, after
            self._longest_query = (longest - len(tokenizer.encode(before + between + after))) // 2
            if self._longest_query < 1:
                raise LoadError("`template` in models.yaml has more tokens than an input may have. Shorten it.")
            self._ending = tokenizer.encode(after, add_special_tokens=False) + self._ending

    def of_texts(self, given: Sequence[str | Sequence[int]], prefix: str, *, truncate: bool) -> list[Input]:
        """Return the inputs of texts, with `prefix` before each, and of token ids, which are used unchanged.

        Raises `RequestError`, naming the input, for one that is too long, unless it is to be cut.
        """
        fields = ["input"] if len(given) == 1 else [f"input[{at}]" for at in range(len(given))]
        texts = []
        for one, field in zip(given, fields, strict=True):
            if isinstance(one, str):
                texts.append(self._clipped(prefix + one, field, truncate=truncate))
            else:
                self._check_ids(one, field)
        read = self._read(texts)
        ids = (next(read)[0] if isinstance(one, str) else list(one) for one in given)
        fitting = (self._fitting(one, field, truncate=truncate) for one, field in zip(ids, fields, strict=True))
        return _not_too_many(map(Input, fitting), "input")

    def of_pairs(self, query: str, documents: Sequence[str], *, truncate: bool) -> list[Input]:
        """Return the inputs of a query with each document; a document that is too long may be cut."""
        most = self._longest_query
        if len(query) > most * _CHARACTERS or len(self._tokenizer.encode(query)) > most:
            raise ContextLengthError(
                f"This model's maximum context length is {self._longest} tokens, and a query may have {most} of them. "
                "Shorten the query.",
                param="query",
            )
        fields = [f"documents[{at}]" for at in range(len(documents))]
        seen = [self._clipped(one, at, truncate=truncate) for one, at in zip(documents, fields, strict=True)]
        pairs = zip(self._read([query] * len(seen), seen), fields, strict=True)
        return _not_too_many((self._of_pair(*pair, field, truncate=truncate) for pair, field in pairs), "documents")

    def _of_pair(self, ids: list[int], types: list[int], field: str, *, truncate: bool) -> Input:
        second = (types.index(1) if 1 in types else len(types)) if self._has_types else None
        return Input(self._fitting(ids, field, truncate=truncate), second)

    def _read(self, *columns: Sequence[str]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield token ids, and types, of texts or pairs; a tokenizer's own objects take a hundred bytes a token."""
        begin = characters = 0
        for end, row in enumerate(zip(*columns, strict=True), 1):
            characters += sum(map(len, row))
            if characters >= _READ_CHARACTERS or end == len(columns[0]):
                read = self._tokenizer(*self._marked([column[begin:end] for column in columns]))
                yield from zip(read["input_ids"], read.get("token_type_ids") or [[]] * (end - begin), strict=True)
                begin, characters = end, 0

    def _marked(self, columns: list[Sequence[str]]) -> list[Sequence[str]]:
        """Return pairs as texts in the template, if there is one."""
        if self._around is None or len(columns) < 2:
            return columns
        before, between, after = self._around
        return [[before + query + between + text + after for query, text in zip(*columns, strict=True)]]

    def _clipped(self, text: str, field: str, *, truncate: bool) -> str:
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


class VllmPooling(VllmAuxiliary[PoolingModelSpec]):
    """One loaded model for embeddings or reranking. Made by `load`."""

    def __init__(  # what `load` has made
        self,
        engine: Any,
        inputs: Inputs,
        launch: Launch[PoolingModelSpec],
        watch: EngineWatch,
        layout: VectorLayout | None,
    ) -> None:
        super().__init__(engine, launch, watch)
        self.max_input_tokens: int = engine.model_config.max_model_len
        self.dimensions: int | None = None if layout is None else engine.model_config.embedding_size
        self._layout = layout
        self._inputs = inputs
        self._turn = asyncio.Lock()

    @classmethod
    async def load(cls, launch: Launch[PoolingModelSpec]) -> Self:
        """Start the engine, check what it is for, and answer one input. Raises like `starting`."""
        folder = await asyncio.to_thread(_Folder.read, launch)
        layout, arguments = folder.layout, partial(pooling_arguments, launch, folder)
        async with starting(launch, arguments) as (engine, watch):
            task = "classify" if layout is None else "embed"
            labels = getattr(engine.model_config.hf_config, "num_labels", None)
            if task not in await engine.get_supported_tasks() or (layout is None and labels != 1):
                made = "one score of a query and a text" if layout is None else "vectors"
                raise LoadError(
                    f"{launch.spec.id}: this model does not make {made}. Use another one, or name its `task` in "
                    "models.yaml."
                )
            model = cls(engine, await asyncio.to_thread(_inputs_of, engine, launch.spec), launch, watch, layout)
            launch.report("answering a first input", 0.9)
            await model._warm_up()
            model.give_way_to_chat()
        return model

    def embed(self, request: EmbeddingRequest, stream: PoolingStream) -> None:
        """Put a vector for each input into `stream`; closing it aborts. It ends with `EngineError`s."""
        self.start(stream, partial(self._embed, request))

    def rerank(self, request: RerankRequest, stream: PoolingStream) -> None:
        """Put a score for each document into `stream`, like `embed`."""
        self.start(stream, partial(self._rerank, request))

    async def _warm_up(self) -> None:
        stream = PoolingStream()
        common: dict[str, Any] = {"request_id": "warm-up", "model": self._launch.spec.id}
        if self._layout is None:
            self.rerank(RerankRequest(**common, query="one", documents=(WARM_UP,), truncate=True), stream)
        else:
            self.embed(EmbeddingRequest(**common, inputs=(WARM_UP,), truncate=True), stream)
        async for _ in stream:
            pass

    async def _embed(self, request: EmbeddingRequest, stream: Stream[Pooled]) -> None:
        self._check_dimensions(request.dimensions)
        texts, prefix = self._inputs.of_texts, self._prefix(request)
        inputs = await asyncio.to_thread(texts, request.inputs, prefix, truncate=request.truncate)
        await self._pool(request, inputs, stream)

    async def _rerank(self, request: RerankRequest, stream: Stream[Pooled]) -> None:
        pairs, query = self._inputs.of_pairs, request.query
        inputs = await asyncio.to_thread(pairs, query, request.documents, truncate=request.truncate)
        await self._pool(request, inputs, stream)

    def _check_dimensions(self, asked: int | None) -> None:
        spec, made = self._launch.spec, self.dimensions
        if asked is None or asked == made or not isinstance(spec, EmbeddingModelSpec) or made is None:
            return
        least = spec.least_dimensions
        if least is None:
            raise RequestError(
                f"The vectors of this model have {made} numbers and cannot be cut. Leave `dimensions` out.",
                param="dimensions",
            )
        if not least <= asked <= made:
            raise RequestError(f"`dimensions` is from {least} to {made} for this model.", param="dimensions")

    async def _pool(self, request: PoolingRequest, inputs: Sequence[Input], stream: Stream[Pooled]) -> None:
        """Have all inputs computed, some at a time."""
        if request.before_turn is not None:
            await request.before_turn(sum(len(one.ids) for one in inputs))
        rest = iter(enumerate(inputs))
        self.admission.arrive(request)
        try:
            workers = min(_AT_ONCE, len(inputs))
            await together(self._work(request, rest, stream) for _ in range(workers))
        finally:
            self.admission.depart(request)

    async def _work(self, request: PoolingRequest, rest: Iterator[tuple[int, Input]], stream: Stream[Pooled]) -> None:
        from engine.backends.vllm.outputs import TranslatedErrors

        errors = TranslatedErrors(self.max_input_tokens, None)
        dimensions = request.dimensions if isinstance(request, EmbeddingRequest) else None
        normalised = self._layout is not None and self._layout.normalised
        for index, one in rest:
            urgency = request.urgency if index < _INTERACTIVE_INPUTS else max(request.urgency, Urgency.BATCH)
            ticket = self.admission.enter(
                request.owner, prompt_tokens=len(one.ids), max_tokens=0, weight=request.queue_share, urgency=urgency
            )
            async with ticket:
                stream.dispatched()
                with errors:
                    made = await self._encoded(f"pool-{request.request_id}-{index}", one, ticket.priority)
                # A step brings up to 64 at once: one per round of the event loop, so that chats go on between them.
                async with self._turn:
                    await asyncio.sleep(0)
                ticket.answer_tokens = 1  # its duration counts for the estimate of others
            stream.put(Pooled(index, len(one.ids), numbers_of(made, dimensions, normalised=normalised)))

    async def _encoded(self, name: str, given: Input, priority: int) -> Tensor:
        """Return what the model makes of an input. Cancelling aborts it."""
        from vllm.inputs.engine import tokens_input
        from vllm.pooling_params import PoolingParams

        # The score before the sigmoid, which makes all large ones equal.
        scored = PoolingParams(task="classify", use_activation=False)
        parameters = scored if self._layout is None else PoolingParams(task="embed")
        if given.second is not None:
            parameters.extra_kwargs = {"compressed_token_type_ids": given.second}
        async for output in self._engine.encode(tokens_input(given.ids), parameters, name, priority=priority):
            made = output.outputs.data
        return made.float()

    def _prefix(self, request: EmbeddingRequest) -> str:
        spec, layout = self._launch.spec, self._layout
        if layout is None or not isinstance(spec, EmbeddingModelSpec):
            return ""
        said = {"query": spec.query_prefix, "document": spec.document_prefix}.get(request.input_type or "")
        return layout.prefixes.get(request.input_type or "", "") if said is None else said


def _not_too_many(inputs: Iterable[Input], param: str) -> list[Input]:
    """Return the inputs. Raises `RequestError` as soon as they have more tokens than a request may have."""
    made, tokens = [], 0
    for one in inputs:
        made.append(one)
        tokens += len(one.ids)
        if tokens > MOST_TOKENS:
            raise RequestError(
                f"The inputs have more than {MOST_TOKENS} tokens together, which is the most of a request. Send fewer.",
                param=param,
            )
    return made


def numbers_of(made: Tensor, dimensions: int | None, *, normalised: bool) -> array[float]:
    """Return a vector, cut to its first `dimensions`, or a score. Raises `GenerationError` if values are not finite."""
    if not made.isfinite().all():
        raise GenerationError(
            "The model made no valid numbers of a text. Send it in other words, or ask your administrator to set "
            "another `dtype`."
        )
    if dimensions is not None and dimensions < len(made):
        made = made[:dimensions]
        if normalised:
            made = made / made.norm().clamp(min=1e-12)
    numbers = array("f")
    numbers.frombytes(made.numpy().tobytes())
    return numbers


def _inputs_of(engine: Any, spec: PoolingModelSpec) -> Inputs:
    """Blocks for seconds, to import what requests would else import on the event loop."""
    for name in ("vllm.inputs.engine", "vllm.pooling_params", "engine.backends.vllm.outputs"):
        importlib.import_module(name)
    from engine.backends.vllm.request import check_tokens

    template = spec.template if isinstance(spec, RerankModelSpec) else None
    longest = engine.model_config.max_model_len
    return Inputs(engine.renderer.tokenizer, longest, partial(check_tokens, engine), template)


@dataclass(frozen=True, slots=True)
class _Folder:
    """How a folder makes vectors (None: scores), its longest input, its number format, and what vLLM has to read in it.

    `overrides` are of its config.json: they make a chat model that was trained to rerank one that vLLM has score.
    """

    layout: VectorLayout | None
    longest: int | None
    saved_in: str | None
    overrides: dict[str, Any]

    @classmethod
    def read(cls, launch: Launch[PoolingModelSpec]) -> Self:
        """Blocking. Raises `LoadError`."""
        spec = launch.spec
        longest, saved_in = check_pooling_folder(launch.weights)
        if isinstance(spec, EmbeddingModelSpec):
            return cls(read_layout(launch.weights, spec.pooling), longest, saved_in, {})
        return cls(None, longest, saved_in, _scored(launch.weights, spec))


def _scored(folder: Path, spec: RerankModelSpec) -> dict[str, Any]:
    """Return what makes vLLM score with a chat model's logits; nothing for a model that has a score of its own.

    Source: vLLM's `SequenceClassificationConfig`.
    """
    named = read_object(folder / "config.json").get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if not architecture.endswith("ForCausalLM"):
        return {}
    if spec.score_tokens is None:
        raise LoadError(
            f"{spec.id}: {folder.name} is a chat model. Of one that was trained to rerank, like Qwen3-Reranker, write "
            "`score_tokens` and `template` in models.yaml (docs/own-models.md); use another model otherwise."
        )
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(str(folder))
    for token in spec.score_tokens:
        if token not in tokenizer.get_vocab():
            raise LoadError(f"{spec.id}: {folder.name} has no token {shown(token)} (`score_tokens` in models.yaml).")
    return {
        "architectures": [architecture.removesuffix("ForCausalLM") + "ForSequenceClassification"],
        "classifier_from_token": list(spec.score_tokens),
        "method": "from_2_way_softmax" if len(spec.score_tokens) == 2 else "no_post_processing",
    }


def pooling_arguments(launch: Launch[PoolingModelSpec], folder: _Folder) -> dict[str, Any]:
    from vllm.config import PoolerConfig

    engine, layout = launch.spec.engine, folder.layout
    pooler = PoolerConfig(task="classify")
    if layout is not None:
        kind: Any = layout.pooling.upper()
        pooler = PoolerConfig(task="embed", seq_pooling_type=kind, use_activation=layout.normalised)
    longest = [each for each in (engine.max_input_tokens, folder.longest) if each is not None]
    return {
        **auxiliary_arguments(launch, folder.saved_in),
        "runner": "pooling",
        "pooler_config": pooler,
        "max_model_len": min(longest, default=None),
        "hf_overrides": folder.overrides,
    }
