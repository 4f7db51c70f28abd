"""Every name of vLLM, transformers, torch and CPython that our code uses and that is not stable API.

A name that a model cannot run without is needed. All others belong to optional patches: `apply` leaves a patch out,
with one line in the log, if vLLM no longer has its names. scripts/check-vllm reads this list for a new release.
Nothing is imported here; names are strings.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

from engine.compat import ForeignName, Kind, Sources, missing
from engine.errors import LoadError

_T = TypeVar("_T")

_log = logging.getLogger("hearth.vllm")


def _patch(patch: str, kind: Kind, without: str, since: str = "0.32") -> Callable[..., ForeignName]:
    """Return a function that makes the entries of one patch. `without`: what happens if one of its names is gone."""

    def entry(name: str, why: str, parameters: str | None = None, *, overridden: bool = False) -> ForeignName:
        known = None if parameters is None else tuple(parameters.split())
        return ForeignName(name, kind, patch, why, since, without, known, overridden)

    return entry


_chat = _patch("chat", "needed", "No chat model can be loaded.")
_answers = _patch("answers", "needed", "No chat request can be answered.")
_schemas = _patch("schemas", "needed", "Requests with a JSON schema or strict tools fail.")
_end = _patch("end", "optional", "Descriptors and threads of an engine that has ended stay until a garbage collection.")
_death = _patch("death", "optional", "Requests that are being tokenised learn a little later that the engine has died.")
_checks = _patch("grammar check", "optional", "vLLM parses each grammar once more, on the event loop.")
_tools = _patch("tool parsers", "optional", "Some older tool parsers lose calls that follow words, or parts of calls.")
_marks = _patch("marks in texts", "optional", "A Hermes call whose text has the mark of its end is cut there.")
_exact = _patch("exact values", "optional", "Values forced into Qwen's XML calls may keep white space at their ends.")
_processes = _patch("processes", "optional", "Engines are spawned by vLLM itself, on a CPU in 20 s instead of 5 s.")
_fork = _patch("fork server", "optional", "A fork server that died comes back without its libraries.", "Python 3.11")
_settings = _patch("settings", "optional", "vLLM reads its environment for each request: a fifteenth of the CPU time.")
_amx = _patch("amx", "optional", "A very short first prompt may end an engine on a CPU with AMX.", "torch 2.13")
_grammar_threads = _patch("grammar threads", "optional", "A slow grammar may hold up the quick ones.")
_newcomers = _patch("newcomers", "optional", "While the KV cache is full, a newcomer may wait for seconds.")
_phases = _patch("phases", "optional", "The start of a large model shows one phase for minutes.")
_shared = _patch("shared steps", "optional", "A short question waits until a long prompt before it has been read.")
_first = _patch("interactive first", "optional", "Questions beside a batch have its long steps until it has ended.")
_dumps = _patch("dumps", "optional", "After a failed step the log may hold what clients sent.")
_seeds = _patch("seeds", "optional", "On a CPU a long prompt with a seed may end the engine.")
_cache = _patch("cache at start", "optional", "On a CPU the KV cache takes its memory in use, not at the start.")
_compiling = _patch("compile models only", "optional", "On a CPU models run uncompiled.")
_loading = _patch("load compiled code", "optional", "On a CPU a compiled model is compiled again at each start.")
_metrics = _patch("metrics", "optional", "/metrics has none of vLLM's own metrics.")
_latencies = _patch("latencies", "optional", "A token costs the server a tenth more while vLLM counts for /metrics.")
_kernels = _patch("cpu kernels", "optional", "Uncompiled models on a CPU take a seventh longer for a step.")
_flashinfer = _patch("flashinfer", "optional", "Without nvcc vLLM may choose kernels of FlashInfer, and die of them.")
_groups = _patch("kv groups", "optional", "Models with linear attention or sliding windows are sent too many requests.")
_prompts = _patch("text prompts", "optional", "Short conversations take three times the CPU time to render.")
_fresh = _patch("fresh folders", "optional", "A model in a replaced folder keeps its old tokenizer until a restart.")
_steps = _patch("text steps", "optional", "A token costs the server up to twice the time.")

_ENGINE = "vllm.v1.engine.async_llm.AsyncLLM"
_SERVING = "vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat"
_CLIENT = "vllm.v1.engine.core_client"
_INPUTS = "vllm.v1.engine.input_processor.InputProcessor"
_OUTPUTS = "vllm.v1.engine.output_processor"
_XGRAMMAR = "vllm.v1.structured_output.backend_xgrammar.XgrammarBackend"
_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
_QUEUE = "vllm.v1.core.sched.request_queue.RequestQueue"
_TOOL_PARSER = "vllm.tool_parsers.abstract_tool_parser.ToolParser"
_HERMES = "vllm.tool_parsers.hermes_tool_parser.Hermes2ProToolParser"
_PARSER_ENGINE = "vllm.parser.engine.parser_engine.ParserEngine"
_LOGGER = "vllm.v1.metrics.loggers.PrometheusStatLogger"
_RUNNER = "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
_LOGGED = ("_gauge_cls", "_counter_cls", "_histogram_cls", "_spec_decoding_cls", "_perf_metrics_cls")
_BUCKETS = ("_upper_bounds", "_buckets", "_sum")
_HF = "vllm.renderers.hf"
_PROCESSORS = ("processor", "feature_extractor", "image_processor", "video_processor")

NAMES: tuple[ForeignName, ...] = (
    _chat(f"{_ENGINE}._run_output_handler", "starts to read what the engine sends", ""),
    _chat(f"{_ENGINE}.output_handler", "the task that reads; without it the engine is ended"),
    _chat(f"{_ENGINE}.engine_core", "the client that owns processes and sockets"),
    _chat(
        f"{_ENGINE}.from_vllm_config",
        "starts the engine",
        "vllm_config usage_context enable_log_requests disable_log_stats stat_loggers",
    ),
    _chat("vllm.engine.arg_utils.AsyncEngineArgs.create_engine_config", "makes its configuration", "usage_context"),
    _chat(f"{_ENGINE}.shutdown", "ends the processes", "timeout"),
    _answers(
        f"{_SERVING}._create_chat_logprobs",
        "the probabilities of tokens in the convention's form",
        "token_ids top_logprobs tokenizer num_output_top_logprobs",
    ),
    _answers(f"{_SERVING}._make_parser", "the parsers of one choice", "request tokenizer chat_template_kwargs"),
    _answers(f"{_SERVING}._effective_chat_template_kwargs", "the template's variables, for the parsers", "request"),
    _answers(
        f"{_SERVING}._engine_reasoning_kwargs",
        "what the engine has to know of reasoning",
        "request parser chat_template_kwargs prompt_token_ids",
    ),
    _answers(f"{_SERVING}.default_sampling_params", "of the model"),
    _answers(f"{_SERVING}.override_max_tokens", "of the model"),
    _answers(
        "vllm.entrypoints.serve.utils.api_utils.get_max_tokens",
        "the limit of an answer",
        "max_model_len max_tokens input_length default_sampling_params override_max_tokens",
    ),
    _answers("vllm.inputs.engine.tokens_input", "a prompt for the core", "prompt_token_ids"),
    _answers(f"{_ENGINE}.input_processor", "makes a request to the core"),
    _answers(f"{_INPUTS}.process_inputs", "likewise", "request_id prompt params supported_tasks priority lora_request"),
    _answers(f"{_ENGINE}.output_processor", "makes outputs of what the core sends"),
    _answers(
        f"{_OUTPUTS}.OutputProcessor.add_request",
        "registers a request, with our collector in the place of vLLM's",
        "request prompt parent_req request_index queue",
    ),
    _answers(f"{_CLIENT}.EngineCoreClient.add_request_async", "sends it to the core", "request"),
    _answers("vllm.v1.engine.parallel_sampling.ParentRequest.get_child_info", "several answers to a prompt", "index"),
    _answers(f"{_ENGINE}.abort", "ends a request", "request_id internal"),
    _answers(f"{_SERVING}.parser_cls", "the parsers of a model"),
    _answers("vllm.renderers.online_renderer.OnlineRenderer.render_chat", "renders and tokenises", "request"),
    _schemas("vllm.sampling_params.StructuredOutputsParams._backend", "chosen by us: our own check has run"),
    _schemas("vllm.v1.structured_output.request.get_structured_output_key", "what would be compiled", "params"),
    _schemas(_XGRAMMAR, "made in a process that can be killed", "vllm_config tokenizer vocab_size"),
    _schemas(f"{_XGRAMMAR}.compile_grammar", "compiles one grammar there", "request_type grammar_spec"),
    _end(f"{_CLIENT}.BackgroundResources.ctx", "the ZeroMQ context that vLLM leaves open"),
    _end(f"{_CLIENT}.BackgroundResources.engine_manager", "owns the processes"),
    _end("vllm.v1.engine.utils.CoreEngineProcManager.processes", "their pipes are left open"),
    _death(f"{_CLIENT}.BackgroundResources.engine_dead", "set when the process has died"),
    _death(f"{_OUTPUTS}.OutputProcessor.propagate_error", "ends what waits for the engine", "e"),
    _checks(f"{_INPUTS}.structured_outputs_config", "None: grammars are checked by us"),
    _tools("vllm.parser.abstract_parser.Parser.tool_parser_cls", "replaced by a class with our layer on top"),
    _tools(f"{_TOOL_PARSER}.engine_based_streaming", "tells which need no layer"),
    _tools(
        f"{_TOOL_PARSER}.extract_tool_calls_streaming",
        "overridden by our layer",
        "previous_text current_text delta_text previous_token_ids current_token_ids delta_token_ids request",
        overridden=True,
    ),
    _marks(_HERMES, "gets a layer of ours"),
    _marks(f"{_HERMES}._extract_tool_call_jsons", "overridden", "text"),
    _exact("vllm.parser.engine.adapters.ParserEngineToolAdapter._parser_engine_cls", "replaced by a class of ours"),
    _exact("vllm.parser.qwen3.Qwen3Parser", "the parser of Qwen's XML calls"),
    _exact(f"{_PARSER_ENGINE}._coerce_dict", "overridden: values", "args properties"),
    _exact(f"{_PARSER_ENGINE}._streamable_string_keys", "overridden: values not yet complete", "properties"),
    _processes("vllm.v1.engine.utils.get_mp_context", "replaced: processes of ours, tied to the server", ""),
    _fork("multiprocessing.forkserver._forkserver", "the fork server of this process"),
    _fork("multiprocessing.forkserver.ForkServer._forkserver_pid", "whether it lives"),
    _fork("multiprocessing.forkserver.ForkServer._forkserver_alive_fd", "closed in engines, else neither ever ends"),
    _settings("vllm.envs.enable_envs_cache", "settings are computed once", ""),
    _settings("vllm.envs.disable_envs_cache", "and again while an engine starts", ""),
    _amx("torch.cpu._is_amx_tile_supported", "whether the processor has AMX", ""),
    _amx("torch.cpu._init_amx", "asks the kernel for it", ""),
    _grammar_threads("vllm.v1.structured_output.StructuredOutputManager.__init__", "wrapped"),
    _grammar_threads("vllm.v1.structured_output.StructuredOutputManager.executor", "replaced by one with more threads"),
    *(each(f"{_SCHEDULER}.schedule", "wrapped") for each in (_newcomers, _shared, _first)),
    *(each(f"{_SCHEDULER}.running", "what a step goes on with") for each in (_newcomers, _shared, _first)),
    *(each(f"{_SCHEDULER}.waiting", "who is next") for each in (_newcomers, _shared, _first)),
    *(each(f"{_QUEUE}.peek_request", "who is next", "") for each in (_newcomers, _shared, _first)),
    *(each(f"{_SCHEDULER}.max_num_running_reqs", "how many places there are") for each in (_shared, _first)),
    *(each(f"{_SCHEDULER}.max_num_scheduled_tokens", "what a step has") for each in (_shared, _first)),
    *(each(f"{_SCHEDULER}.scheduler_config", "what one prompt may have of a step") for each in (_shared, _first)),
    *(each("vllm.v1.request.Request.is_prefill_chunk", "whether its prompt is read") for each in (_shared, _first)),
    *(each(f"{_SCHEDULER}.kv_cache_manager", "has the blocks") for each in (_newcomers, _first)),
    *(each(f"{_SCHEDULER}._preempt_request", "preempts it", "request timestamp") for each in (_newcomers, _first)),
    *(each("vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots", "wrapped") for each in (_newcomers, _first)),
    *(
        entry(f"vllm.v1.core.{name}", "whether a request waits for blocks, or for what another one computes")
        for entry in (_newcomers, _first)
        for name in (
            "kv_cache_manager.KVCacheManager.coordinator",
            "kv_cache_coordinator.KVCacheCoordinator.single_type_managers",
            "kv_cache_manager.KVCacheBlocks.blocks",
        )
    ),
    _first("vllm.v1.request.Request.has_encoder_inputs", "whether it has pictures"),
    _first(f"{_QUEUE}.remove_requests", "for one step", "requests"),
    _first(f"{_QUEUE}.prepend_requests", "likewise", "requests"),
    _phases("vllm.v1.executor.abstract.Executor.__init__", "wrapped: weights are read", "vllm_config"),
    _phases("vllm.v1.engine.core.EngineCore._initialize_kv_caches", "wrapped: it is compiled, measured", "vllm_config"),
    _phases("vllm.v1.executor.abstract.Executor.compile_or_warm_up_model", "wrapped: it is tried out", ""),
    _seeds(f"{_RUNNER}.sample_tokens", "wrapped", "grammar_output"),
    _seeds(f"{_RUNNER}.input_batch", "the requests of a step"),
    _seeds(f"{_RUNNER}.discard_request_mask", "whose token is thrown away"),
    _seeds("vllm.v1.worker.gpu_input_batch.InputBatch.generators", "seeds, by the place of a request"),
    _seeds("vllm.v1.worker.gpu_input_batch.InputBatch.num_reqs", "how many there are"),
    _cache(f"{_RUNNER}.initialize_kv_cache_tensors", "wrapped: all of the cache is written to once"),
    _compiling("vllm.compilation.wrapper.TorchCompileWithNoGuardsWrapper.__init__", "wrapped: torch's compiler is on"),
    _loading("torch.compiler.load_compiled_function", "wrapped: adds a method that vLLM asks for"),
    _loading("torch._dynamo.aot_compile.AOTCompiledFunction._artifacts", "leads to the object that lacks it"),
    *(_metrics(f"{_LOGGER}.{name}", "our own registry") for name in _LOGGED),
    _metrics("vllm.v1.spec_decode.metrics.SpecDecodingProm._counter_cls", "likewise"),
    _metrics("vllm.v1.metrics.perf.PerfMetricsProm._counter_cls", "likewise"),
    _latencies(
        f"{_LOGGER}.record",
        "overridden: times between tokens are sorted at once",
        "scheduler_stats iteration_stats mm_cache_stats engine_idx",
        overridden=True,
    ),
    _latencies(f"{_LOGGER}.histogram_inter_token_latency", "what takes them"),
    _latencies("vllm.v1.metrics.stats.IterationStats.inter_token_latencies_iter", "where they are"),
    *(_latencies(f"prometheus_client.Histogram.{name}", "takes them at once") for name in _BUCKETS),
    _kernels("vllm.engine.arg_utils.AsyncEngineArgs.ir_op_priority", "has vLLM take our kernels"),
    _kernels("vllm.ir.ops.rms_norm", "the operation that the kernel is registered for"),
    _kernels("vllm.ir.ops.fused_add_rms_norm", "likewise"),
    _kernels("vllm.ir.op.IrOp.register_impl", "registers a kernel", "provider supported supports_args inplace"),
    _kernels("vllm.ir.op.IrOp.impls", "what is registered"),
    _kernels("vllm.platforms.interface.Platform.import_kernels", "loads vLLM's compiled kernels", ""),
    _flashinfer("vllm.utils.flashinfer.has_flashinfer", "whether its kernels can be compiled", ""),
    _groups("vllm.v1.engine.core.EngineCore.get_kv_cache_group_metadata", "the groups of the KV cache", ""),
    _groups(f"{_CLIENT}.AsyncMPClient.call_utility_async", "asks the core for them", "method"),
    _prompts("transformers.utils.chat_template_utils._compile_jinja_template", "the template itself", "chat_template"),
    _prompts("transformers.tokenization_utils_tokenizers.TokenizersBackend._tokenizer", "the tokenizer alone"),
    _prompts(f"{_HF}.resolve_chat_template", "which template", "tokenizer chat_template tools model_config"),
    _prompts(
        f"{_HF}.resolve_chat_template_content_format",
        "whether it takes texts",
        "chat_template tools given_format tokenizer model_config",
    ),
    _dumps("vllm.v1.engine.core.dump_engine_exception", "does nothing"),
    _prompts(f"{_HF}.resolve_chat_template_kwargs", "its variables", "tokenizer chat_template chat_template_kwargs"),
    *(
        _fresh(f"vllm.{name}", "emptied: it remembers by the folder's name what was read of it")
        for name in (
            "tokenizers.registry.cached_get_tokenizer",
            "tokenizers.registry.cached_resolve_tokenizer_args",
            *(f"transformers_utils.processor.cached_get_{kind}" for kind in _PROCESSORS),
            "renderers.hf._PROCESSOR_CHAT_TEMPLATES",
            "transformers_utils.config.checkpoint_has_lm_head",
            "utils.func_utils._supports_kw",
        )
    ),
    _steps(
        f"{_OUTPUTS}.RequestState.make_request_output",
        "overridden: our own steps; its class is replaced",
        "new_token_ids pooling_output finish_reason stop_reason",
    ),
    _steps(f"{_OUTPUTS}.RequestState.queue", "our collector"),
    _steps(f"{_CLIENT}.AsyncMPClient.outputs_queue", "whether newer steps are there"),
    _steps(f"{_OUTPUTS}.OutputProcessor.request_states", "what it knows of each request"),
    _steps(f"{_OUTPUTS}.RequestState.output_kind", "whether each step is wanted, or the last"),
    _steps(f"{_OUTPUTS}.RequestState.num_cached_tokens", "for the usage"),
    _steps(f"{_OUTPUTS}.RequestState.prompt_len", "likewise"),
    _steps(f"{_OUTPUTS}.RequestState.track_weight_version", "overridden", "weight_version", overridden=True),
)


def check(model: str) -> None:
    """Raise a `LoadError` that names what is needed and missing, if anything is."""
    findings = _problems("kind", "needed")
    if findings and importlib.util.find_spec("vllm") is not None:  # else its import says that it is not installed
        raise LoadError(
            f"{model}: this version of vLLM does not have what Hearth needs: {findings}. Install the version in "
            "requirements/, or a newer Hearth."
        )


@functools.cache
def fits(patch: str) -> bool:
    """Whether the names of an optional patch are there; if not, the log says so once. The first call reads sources."""
    findings = _problems("patch", patch)
    if findings:
        _say(patch, findings)
    return not findings


@functools.cache
def _problems(field: Literal["kind", "patch"], value: str) -> str:
    """Say what is wrong with the names of a patch or a kind; reads vLLM's sources."""
    findings = missing([each for each in NAMES if getattr(each, field) == value], Sources())
    return "; ".join(f"{each.name} {problem}" for each, problem in findings)


@contextmanager
def guarded(patch: str) -> Iterator[None]:
    """Leave out the rest of the block, with a line in the log, if a name in it is missing or takes other arguments."""
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        _say(patch, f"{type(error).__name__}: {error}")


def apply(patch: str, change: Callable[[], _T]) -> _T | None:
    """Make an optional change and return its result; None if it was left out."""
    if fits(patch):
        with guarded(patch):
            return change()
    return None


def _say(patch: str, problem: str) -> None:
    without = next(each.without for each in NAMES if each.patch == patch)
    _log.warning("Left out with this version of vLLM: %s (%s). %s", patch, problem, without)
