"""What a model cannot do is refused by name, also where vLLM returns an error instead of raising it."""

import gc
import os
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest

from engine.demo import weights_dir
from engine.errors import RequestError, UnsupportedCapabilityError
from engine.types import ChatRequest

pytestmark = [
    pytest.mark.engine,  # imports vLLM
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),  # vLLM's own use of it
]

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def renderer() -> Any:
    """vLLM's, of a model without a tool parser."""
    environment = dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are other people's, at import
            from vllm.engine.arg_utils import EngineArgs
            from vllm.renderers import renderer_from_config
            from vllm.renderers.online_renderer import OnlineRenderer

            config = EngineArgs(model=str(weights_dir("chat"))).create_engine_config()
            return OnlineRenderer(
                model_config=config.model_config,
                renderer=renderer_from_config(config),
                request_logger=None,
                chat_template=None,
                chat_template_content_format="auto",
            )
    finally:  # vLLM changes it
        os.environ.clear()
        os.environ.update(environment)


async def rendered(renderer: Any, **fields: Any) -> Any:
    from engine.backends.vllm.request import render, translate

    request = ChatRequest(request_id="x", model="x", messages=[{"role": "user", "content": "?"}], **fields)
    return await render(renderer, translate(request, stream=True))


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function", "function": {"name": "now"}}])
async def test_tools_without_a_tool_parser_are_a_capability_that_is_lacking(renderer: Any, choice: Any) -> None:
    with pytest.raises(UnsupportedCapabilityError) as caught:
        await rendered(renderer, tools=[TOOL], tool_choice=choice)
    assert caught.value.param == "tools"
    assert "function_calling" in str(caught.value)


async def test_tools_that_must_not_be_called_need_no_tool_parser(renderer: Any) -> None:
    assert (await rendered(renderer, tools=[TOOL], tool_choice="none"))["prompt_token_ids"]


async def test_what_a_template_refuses_is_a_fault_of_the_messages(renderer: Any) -> None:
    from engine.backends.vllm.request import render, translate

    request = ChatRequest(request_id="x", model="x", messages=[{"role": "user", "content": 7}])
    with pytest.raises(RequestError) as caught:
        await render(renderer, translate(request, stream=True))
    assert caught.value.param == "messages"


@pytest.mark.usefixtures("renderer")
def test_a_tokenizer_of_a_folder_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    from vllm.tokenizers.registry import cached_get_tokenizer

    from engine.backends.vllm.engine import forget_folders

    folder = shutil.copytree(weights_dir("chat"), tmp_path / "model")
    before = cached_get_tokenizer(str(folder)).chat_template
    (folder / "chat_template.jinja").write_text("another one")
    assert cached_get_tokenizer(str(folder)).chat_template == before
    forget_folders()
    assert cached_get_tokenizer(str(folder)).chat_template == "another one"


@pytest.mark.usefixtures("renderer")
def test_a_tokenizer_of_an_earlier_load_is_not_kept() -> None:
    from vllm.tokenizers import get_tokenizer, maybe_make_thread_pool
    from vllm.utils.func_utils import supports_kw

    from engine.backends.vllm.engine import forget_folders

    tokenizer = get_tokenizer(str(weights_dir("chat")))
    maybe_make_thread_pool(tokenizer)
    supports_kw(tokenizer.__class__.apply_chat_template, "tools")  # what vLLM asks when it renders
    gone = weakref.ref(tokenizer.__class__.apply_chat_template)
    del tokenizer
    forget_folders()
    gc.collect()
    assert gone() is None
