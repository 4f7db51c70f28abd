"""DSPy's language model. Its typed answers are asked for in the prompt, which no demo model understands."""

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a price list from the internet when imported

import checks
import dspy
from checks import API_KEY, BASE_URL, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY


def lm(model: str = MODEL, key: str = API_KEY) -> Any:
    return dspy.LM(
        f"openai/{model}", api_base=BASE_URL, api_key=key, temperature=0, max_tokens=200, num_retries=0, cache=False
    )


def chat() -> None:
    checks.same(lm()(DEMO["question"]), [DEMO["answer"]])


def wrong_key() -> None:
    checks.raises(Exception, DEMO["wrong_key_message"], lambda: lm(key=WRONG_KEY)("Hello!"))


def unknown_model() -> None:
    checks.raises(Exception, DEMO["unknown_model_message"], lambda: lm(UNKNOWN_MODEL)("Hello!"))


checks.run(chat, wrong_key, unknown_model)
