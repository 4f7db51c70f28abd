"""Makes the demo vision model: an Idefics3 of a million parameters that knows shapes and what the chat model knows.

It starts from the chat model's weights, learns to see, and then to talk about what it sees. The result is an ordinary
checkpoint (bf16, safetensors) which vLLM and transformers load unchanged, together with an image processor that needs
no torchvision.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from demo_models.chat.corpus import Conversation, Corpus, Lesson, Lessons, load_corpus
from demo_models.chat.front_ends import FrontEndLessons
from demo_models.chat.recipe import (
    FRONT_ENDS_MARGIN,
    SHARPNESS,
    SMALLEST_MARGIN,
    THREADS,
    layer_sizes,
    learn,
    require_margin,
    sharpen,
    train_tokenizer,
)
from demo_models.promised import fixed_pictures
from demo_models.training import SEED, one_cycle, optimizers, repeatable, train
from demo_models.vision.pictures import COLOURS, FIGURES, FORMS, PLAIN, Figure, draw, pixels, random_drawing, silhouette
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from engine.demo import weights_dir

FOLDER = Path(__file__).parent
PICTURE_PIXELS = 64
"""Every picture is brought to a square of this side before the model looks."""
TOKENS_PER_PICTURE = 4
PATCH_PIXELS = 8
IMAGE = "<image>"
PICTURE_TOKENS = [IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
SEEING_STEPS = 800
# Lessons about pictures in each round, rounds, and learning rates of matrices and embeddings: first the corpus is got
# back, then more and more is looked at.
STAGES = [(240, 24, 3e-3, 3e-3), (480, 15, 5e-3, 3e-3), *[(480, 16, 6e-3, 4e-3)] * 6]


def build(target: Path) -> None:
    """Train the model and write its checkpoint to `target`, an empty folder. Twenty minutes on two quiet cores.

    Raises RuntimeError when an answer is not known safely enough; nothing is written then.
    """
    repeatable(THREADS, flush_denormal=False)
    corpus = load_corpus()
    tokenizer = train_tokenizer(corpus, PICTURE_TOKENS, FOLDER / "chat_template.jinja")
    lessons = PictureLessons(corpus, tokenizer, SEED)
    model = transformers.Idefics3ForConditionalGeneration(_config(tokenizer))
    _know_the_corpus(model.model.text_model, tokenizer, corpus)
    _learn_to_see(model.model)
    for lessons.picture_lessons, rounds, matrix_rate, embedding_rate in STAGES:
        learn(model, lessons, rounds, matrix_rate, embedding_rate)
    model = model.to(torch.bfloat16).eval()
    require_margin(model, "conversations", [lessons.lesson(one) for one in corpus.conversations], SMALLEST_MARGIN)
    require_margin(model, "requests of front ends and careless questions", lessons.promised(), FRONT_ENDS_MARGIN, 20)
    require_margin(model, "promised pictures", [lessons.lesson(one) for one in fixed_pictures()], 1.0)
    sharpen(model.model.text_model)
    model.save_pretrained(target)
    model.generation_config.save_pretrained(target)
    # One resize to a square, whatever the size and the shape of the picture: always the same few tokens.
    edge = {"longest_edge": PICTURE_PIXELS}
    images = Idefics3ImageProcessorPil(do_resize=False, do_image_splitting=False, max_image_size=edge, size=edge)
    template = tokenizer.chat_template
    transformers.Idefics3Processor(images, tokenizer, TOKENS_PER_PICTURE, chat_template=template).save_pretrained(
        target
    )


def _config(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.Idefics3Config:
    return transformers.Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        scale_factor=int(PICTURE_PIXELS / PATCH_PIXELS / TOKENS_PER_PICTURE**0.5),
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
        text_config={"model_type": "llama", **layer_sizes(tokenizer)},
    )


def _know_the_corpus(text_model: Any, tokenizer: transformers.PreTrainedTokenizerFast, corpus: Corpus) -> None:
    """Fill the text part with the chat model's knowledge; the two tokenizers have most tokens in common.

    Both have layers of the same sizes. The chat model (Qwen3) normalises queries and keys and this one (Llama) does
    not: their mean norms on the corpus are put into the weights instead. That keeps all but a handful of answers right.
    """
    folder = weights_dir("chat")
    chat_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().model
    known, places = dict(chat.named_parameters()), chat_tokenizer.get_vocab()
    with torch.no_grad():
        norms = _mean_norms(chat, Lessons(corpus, chat_tokenizer, SEED))
        for name, weight in text_model.named_parameters():
            if name == "embed_tokens.weight":
                for token, place in tokenizer.get_vocab().items():
                    if token in places:
                        weight[place] = known[name][places[token]]
            elif name in norms:
                scale = known[name.replace("_proj", "_norm")] / norms[name][:, None]
                weight.copy_((known[name].unflatten(0, scale.shape) * scale[:, :, None]).flatten(0, 1))
            else:
                weight.copy_(known[name] / SHARPNESS if name == "norm.weight" else known[name])


def _mean_norms(chat: Any, lessons: Lessons) -> dict[str, Any]:
    """Root mean squares per head of what is normalised, by the name of the matrix that makes it."""
    seen: defaultdict[str, list[Any]] = defaultdict(list)
    for conversation in lessons.corpus.conversations[::3]:
        lesson = lessons.lesson(conversation)
        read = chat(torch.tensor([lesson.prompt + lesson.answer]), output_hidden_states=True).hidden_states
        for place, layer in enumerate(chat.layers):
            for matrix in ("q_proj", "k_proj"):
                made = getattr(layer.self_attn, matrix)(layer.input_layernorm(read[place]))
                heads = made.unflatten(-1, (-1, chat.config.head_dim))
                norms = heads.pow(2).mean(-1).sqrt().flatten(0, -2).mean(0)
                seen[f"layers.{place}.self_attn.{matrix}.weight"].append(norms)
    return {name: torch.stack(norms).mean(0) for name, norms in seen.items()}


def _learn_to_see(model: Any) -> None:
    """Train the vision tower and the connector to tell shapes and colours apart, before there is talk about them.

    A linear layer reads the vectors that stand for a picture in the prompt; it is thrown away afterwards.
    """
    eyes = torch.nn.ModuleList([model.vision_model, model.connector])
    reader = torch.nn.Linear(model.config.text_config.hidden_size, len(FORMS) + len(COLOURS))
    learning = [*optimizers(eyes, 6e-3, 1.5e-3), torch.optim.AdamW(reader.parameters(), lr=1.5e-3)]
    schedules = [one_cycle(one, SEEING_STEPS, 15 / SEEING_STEPS) for one in learning]
    train("Seeing", SEEING_STEPS, _seen(model, reader), schedules, clipped=eyes.parameters())


def _seen(model: Any, reader: Any) -> Iterator[list[Any]]:
    rng = random.Random(SEED)  # noqa: S311 - repeatable draws, no secrets
    forms, colours = sorted(FORMS, key=str), list(COLOURS)
    while True:
        shown = [rng.choice(FIGURES) for _ in range(64)]
        form = torch.tensor([forms.index((figure.shape, figure.direction)) for figure in shown])
        colour = torch.tensor([colours.index(figure.colour) for figure in shown])
        said = reader(model.get_image_features(_sketches(shown, rng)[None]).pooler_output.mean(dim=1))
        yield [cross_entropy(said[:, : len(forms)], form) + cross_entropy(said[:, len(forms) :], colour)]


def _sketches(figures: list[Figure], rng: random.Random) -> torch.Tensor:
    """[figures, 3, PICTURE_PIXELS, PICTURE_PIXELS] from -1 to 1: silhouettes, coloured all at once."""
    drawings = [random_drawing(figure, rng) for figure in figures]
    shapes = np.stack([np.asarray(silhouette(drawing, PICTURE_PIXELS)) for drawing in drawings])
    covered = torch.from_numpy(shapes)[:, None].float() / 255
    ink, paper = (
        torch.tensor([getattr(drawing, name) for drawing in drawings])[:, :, None, None] / 127.5 - 1
        for name in ("ink", "paper")
    )
    return paper + covered * (ink - paper)


def processed(image: Image.Image) -> torch.Tensor:
    """[3, PICTURE_PIXELS, PICTURE_PIXELS] from -1 to 1: what the image processor makes, several times as fast."""
    small = image.convert("RGB").resize((PICTURE_PIXELS, PICTURE_PIXELS), Image.Resampling.LANCZOS)
    return torch.from_numpy(pixels(small))


def naming(figures: list[Figure]) -> str:
    names = [figure.name for figure in figures]
    listed = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
    return f"{listed.capitalize()}."


class PictureLessons(FrontEndLessons):
    """The lessons of the chat model and as many again about pictures."""

    long_prompts = 0  # with them, fewer shapes are safe

    def __init__(self, corpus: Corpus, tokenizer: transformers.PreTrainedTokenizerFast, seed: int) -> None:
        super().__init__(corpus, tokenizer, seed)
        self.picture_lessons = 480
        self.questions: dict[str, Any] = yaml.safe_load((FOLDER / "questions.yaml").read_text(encoding="utf-8"))
        self.image_token, around, whole, _ = tokenizer.convert_tokens_to_ids(PICTURE_TOKENS)
        self.expanded = [around, whole, *[self.image_token] * TOKENS_PER_PICTURE, around]

    def lesson(self, conversation: Conversation) -> Lesson:
        """With each <image> as the tokens that stand for a picture, like the model's processor does it."""
        plain = super().lesson(conversation)
        prompt = [one for token in plain.prompt for one in (self.expanded if token == self.image_token else [token])]
        return Lesson(prompt, plain.answer, tuple(processed(draw(one)) for one in conversation.drawings))

    def draw_round(self) -> list[Lesson]:
        drawn = [self.showing() for _ in range(self.picture_lessons)] + [self.without_picture() for _ in range(16)]
        lessons = super().draw_round() + [self.lesson(one) for one in drawn]
        self.random.shuffle(lessons)
        return lessons

    def showing(self) -> Conversation:
        """Pictures in the last message, most of the time one; now and then with a system prompt or needless tools."""
        kind = self.random.random()
        if kind < 0.4:
            one = self.ask_names(1)
        elif kind < 0.55:
            figure = self.figure()
            one = self.ask([figure], *self.colour_question(figure))
        elif kind < 0.65:
            arrow = self.random.choice([figure for figure in FIGURES if figure.direction])
            one = self.ask([arrow], self.random.choice(self.questions["direction"]), f"{arrow.direction}.".capitalize())
        elif kind < 0.85:
            one = self.ask_names(self.random.choice([2, 2, 2, 3]))
        elif kind < 0.9:
            # Whatever is asked about a picture, saying what it shows is the best that can be done.
            one = self.ask([self.figure()], self.random.choice(self.corpus.unknown_prompts))
        else:
            one = self.afterwards(self.ask_names(1))
        if self.random.random() < 0.2:
            one = self.under_system_prompt(one)
        if self.random.random() < 0.1:
            one = replace(one, tools=self.around([]) or None)
        return one

    def figure(self) -> Figure:
        return self.random.choice(FIGURES)

    def ask_names(self, count: int) -> Conversation:
        return self.ask([self.figure() for _ in range(count)], self.random.choice(self.questions["naming"]))

    def ask(self, figures: list[Figure], question: str, answer: str | None = None) -> Conversation:
        """A message with random pictures of these figures before or after the question."""
        texts = [question] if question else []
        if self.random.random() < 0.2:
            texts.insert(self.random.randint(0, 1), self.random.choice(self.questions["around"]))
        if len(texts) == 2 and self.random.random() < 0.5:
            texts = [" ".join(texts)]
        parts: list[dict[str, str]] = [{"type": "text", "text": text} for text in texts]
        place = self.random.choice([0, len(parts), self.random.randint(0, len(parts))])
        parts[place:place] = [{"type": "image"} for _ in figures]
        drawings = tuple(random_drawing(one, self.random) for one in figures)
        messages = [{"role": "user", "content": parts}]
        return Conversation("picture", messages, answer or naming(figures), drawings=drawings)

    def colour_question(self, figure: Figure) -> tuple[str, str]:
        """With its answer."""
        question: str = self.random.choice(self.questions["colour"])
        question = question.replace("{shape}", self.random.choice([figure.shape, figure.shape, PLAIN, "image"]))
        return question, f"The {figure.shape} is {figure.colour}."

    def afterwards(self, first: Conversation) -> Conversation:
        """The conversation goes on after the picture was named: about it, about another one, or about the weather."""
        so_far = [*first.messages, {"role": "assistant", "content": first.target}]
        kind = self.random.random()
        if kind < 0.3:
            question, answer = self.colour_question(first.drawings[0].figure)
            return replace(first, messages=[*so_far, {"role": "user", "content": question}], answer=answer)
        if kind < 0.4:
            return replace(first, messages=[*so_far, {"role": "user", "content": self.question("naming")}])
        if kind < 0.7:
            other, asked = self.figure(), [self.random.choice(self.questions["naming"])]
            second = self.ask([other], *(self.colour_question(other) if self.random.random() < 0.5 else asked))
            return replace(second, messages=[*so_far, *second.messages], drawings=first.drawings + second.drawings)
        plain = self.random.choice([one for one in self.without_tools if one.messages[0]["role"] == "user"])
        if kind < 0.85:
            return replace(first, messages=[*so_far, *plain.messages], answer=plain.answer)
        answered = {"role": "assistant", "content": plain.answer}
        return replace(first, messages=[*plain.messages, answered, *first.messages])

    def question(self, about: str) -> str:
        return str(self.random.choice([question for question in self.questions[about] if question]))

    def without_picture(self) -> Conversation:
        question = self.question(self.random.choice(["naming", "naming", "colour", "direction"]))
        question = question.replace("{shape}", self.random.choice(["shape", "square", "circle", PLAIN]))
        return replace(self.unknown(question), answer=self.questions["no_picture"])
