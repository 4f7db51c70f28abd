"""What a variant of a model says: which weights could serve it, under which licence, and what they need.

Which variant is used on which machine is decided in engine/placement.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from engine.config_document import shown
from engine.config_profiles import shipped
from engine.config_report import did_you_mean, plain_error
from engine.config_words import Folder, Spec, Word, words

_Gib = Annotated[float, Field(gt=0, le=65536)]


class VariantSpec(Spec):
    """One way to serve a model. Sizes are stated here, or measured after the first load (engine/footprints.py)."""

    id: Annotated[Folder, Field(validation_alias="folder")]
    """Folder of its weights, below the weights directory. Different variants need different folders."""
    repository: (
        Annotated[
            str,
            Field(
                pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$",
                max_length=128,
                json_schema_extra=words("a repository like `owner/name`"),
            ),
        ]
        | None
    ) = None
    """Where `hearth weights pull` gets it. null: the folder is made by hand."""
    revision: (
        Annotated[
            str,
            Field(
                pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]*$",
                max_length=128,
                json_schema_extra=words("a commit, tag or branch of the repository"),
            ),
        ]
        | None
    ) = None
    """Which version of the repository. null: the newest one at the first pull, and that one from then on."""
    licence: Annotated[str, Field(min_length=1, max_length=64)]
    """The licence of the weights, like Apache-2.0."""
    weights_gib: _Gib
    """GiB of all weights in memory, on all GPUs together."""
    resident_gib: _Gib | None = None
    """GiB of them that are on the GPU at the same time, with `offload`. null: all of them."""
    activations_gib: Annotated[float, Field(ge=0, le=65536)] = 1.0
    """GiB on each GPU beside weights and KV cache: CUDA itself, its graphs, and what a step needs at its peak."""
    runs_on: Literal["gpu", "cpu", "any"] = "gpu"
    """The device it is for. any: on a GPU where there is one."""
    min_compute_capability: Annotated[float, Field(ge=0, le=99)] = 0.0
    """Oldest GPU that runs it, like 8.0 for bfloat16 and 8.9 for FP8 arithmetic."""
    tensor_parallel_sizes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(strict=False, min_length=1)
    ] = (1,)
    """Over how many GPUs it can be split; the smallest number that fits is used."""
    quantization: Word | None = None
    """How the weights are stored, for people to read; vLLM finds out by itself. null: as in `dtype`."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format in memory. auto: what the model was saved in."""
    context_length: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    """Tokens of prompt and answer together. null: 8192."""
    chats: Annotated[int, Field(ge=1, le=65536)] = 2
    """For how many conversations of that full length the KV cache must have room at least."""
    kv_kib_per_token: Annotated[float, Field(ge=0, le=65536)] = 0.0
    """KiB of KV cache that one token takes: 2 x layers with full attention x KV heads x head size x 2 bytes."""
    kv_heads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """KV heads: over more GPUs than that the KV cache is not split any further. null: it always is."""
    state_mib_per_chat: Annotated[float, Field(ge=0, le=65536)] = 0.0
    """MiB that a conversation takes whatever its length, in layers with linear attention."""
    profile: str | None = None
    """Profile of an image model, in place of the model's."""
    offload: Literal["none", "model", "sequential"] | None = None
    """What of an image model stays in the GPU's memory. null: what its profile says."""

    @field_validator("profile")
    @classmethod
    def _is_shipped(cls, name: str | None) -> str | None:
        if name is not None and name not in shipped():
            raise plain_error(f"there is no profile `{shown(name)}`{did_you_mean(name, shipped())}")
        return name


def _each_folder_once(variants: tuple[VariantSpec, ...]) -> tuple[VariantSpec, ...]:
    folders = [variant.id for variant in variants]
    for folder in folders:
        if folders.count(folder) > 1:
            raise plain_error(f"names the folder `{shown(folder)}` twice: each variant has its own")
    return variants


Variants = Annotated[tuple[VariantSpec, ...], Field(strict=False, max_length=64), AfterValidator(_each_folder_once)]
