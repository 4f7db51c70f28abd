"""Makes the demo vision model: an Idefics3 of a million parameters that knows shapes and what the chat model knows.

The result is an ordinary checkpoint (bf16, safetensors) which vLLM and transformers load unchanged, together with an
image processor that needs no torchvision. Fixed seeds: the same machine makes the same bytes again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.utils.logging import disable_progress_bar

from engine.demo import fixed_pictures
from engine.demo.chat.corpus import load_corpus
from engine.demo.chat.recipe import SEED, SMALLEST_MARGIN, THREADS
from engine.demo.chat.tokenizer import CONTEXT_TOKENS, train_tokenizer
from engine.demo.chat.training import Pace, margins, train
from engine.demo.vision.eyes import open_eyes
from engine.demo.vision.lessons import (
    FOLDER,
    IMAGE,
    PICTURE_PIXELS,
    PICTURE_TOKENS,
    TOKENS_PER_PICTURE,
    PictureLessons,
)
from engine.demo.vision.pictures import every_figure, plain_drawing
from engine.demo.vision.start import know_the_corpus

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

PATCH_PIXELS = 8
# Lessons about pictures in each round, and the pace: first the corpus is got back, then more and more is looked at.
STAGES = [
    (240, Pace(rounds=24, matrix_learning_rate=3e-3, embedding_learning_rate=3e-3)),
    (480, Pace(rounds=15, matrix_learning_rate=5e-3, embedding_learning_rate=3e-3)),
    *[(480, Pace(rounds=16, matrix_learning_rate=6e-3, embedding_learning_rate=4e-3))] * 5,
]
# In logits. A picture that is promised has to be right also where rounding is another one.
SMALLEST_PICTURE_MARGIN = 1.0
# Every figure drawn plainly in these sizes, and questions about pictures as hard as those of the training.
EXAMINED_SIDES_PIXELS = [64, 224, 1024]
SMALLEST_PLAIN_SHARE = 0.98
EXAMINED = 1000
SMALLEST_SHARE = 0.8

_log = logging.getLogger(__name__)


def build(target: Path) -> None:
    """Train the model and write its checkpoint to `target`, an empty folder.

    Raises RuntimeError when an answer is not known safely enough; nothing is written then.
    """
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(SEED)
    disable_progress_bar()
    tokenizer = _tokenizer()
    lessons = PictureLessons(load_corpus(), tokenizer, SEED)
    model = Idefics3ForConditionalGeneration(_config(tokenizer))
    _log.info(
        "Training %.2f million parameters, a quarter of an hour on two quiet cores.", model.num_parameters() / 1e6
    )
    know_the_corpus(model.model.text_model, tokenizer, lessons.corpus, SEED)
    open_eyes(model.model, SEED)
    for lessons.picture_lessons, pace in STAGES:
        train(model, lessons, pace)
    model = model.to(torch.bfloat16).eval()
    _examine(model, lessons)
    model.save_pretrained(target)
    model.generation_config.save_pretrained(target)
    _processor(tokenizer).save_pretrained(target)


def _examine(model: Any, lessons: PictureLessons) -> None:
    """Raise RuntimeError unless the model knows its answers safely, and nearly always pictures it never saw."""
    plain = [plain_drawing(figure, side) for figure in every_figure() for side in EXAMINED_SIDES_PIXELS]
    for about, drawn, smallest_share, margin in (
        ("conversations", [lessons.lesson(one) for one in lessons.corpus.conversations], 1.0, SMALLEST_MARGIN),
        ("promised pictures", [lessons.promise(one) for one in fixed_pictures()], 1.0, SMALLEST_PICTURE_MARGIN),
        ("plain pictures", [lessons.lesson(lessons.about(drawing)) for drawing in plain], SMALLEST_PLAIN_SHARE, 0.0),
        ("random questions", [lessons.lesson(lessons.showing()) for _ in range(EXAMINED)], SMALLEST_SHARE, 0.0),
    ):
        leads = margins(model, drawn)
        share = sum(lead > margin for lead in leads) / len(leads)
        _log.info("%d %s: %.1f %% right, by at least %.1f.", len(drawn), about, 100 * share, min(leads))
        if share < smallest_share:
            raise RuntimeError(
                f"The model does not know its answers safely: of the {about} {100 * share:.1f} % are right with the"
                f" margin that is asked, and {100 * smallest_share:.0f} % have to be. Give it more rounds (STAGES in"
                " engine/demo/vision/recipe.py), or promise less."
            )


def _tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(
        load_corpus(),
        more_control_tokens=PICTURE_TOKENS,
        template=FOLDER / "chat_template.jinja",
    )


def _processor(tokenizer: PreTrainedTokenizerFast) -> Any:
    """One resize to a square, whatever the size and the shape of the picture: always the same few tokens."""
    image_processor = Idefics3ImageProcessorPil(
        do_resize=False,
        do_image_splitting=False,
        max_image_size={"longest_edge": PICTURE_PIXELS},
        size={"longest_edge": PICTURE_PIXELS},
    )
    return Idefics3Processor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        image_seq_len=TOKENS_PER_PICTURE,
        chat_template=tokenizer.chat_template,
    )


def _config(tokenizer: PreTrainedTokenizerFast) -> Idefics3Config:
    patches = (PICTURE_PIXELS // PATCH_PIXELS) ** 2
    return Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        scale_factor=int((patches // TOKENS_PER_PICTURE) ** 0.5),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": PICTURE_PIXELS,
            "patch_size": PATCH_PIXELS,
            "initializer_range": 0.05,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": CONTEXT_TOKENS,
            "initializer_range": 0.05,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
    )
