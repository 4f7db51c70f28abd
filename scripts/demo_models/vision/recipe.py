"""Makes the demo vision model: an Idefics3 of a million parameters that knows shapes and what the chat model knows.

It starts from the chat model's weights, learns to see, and then to talk about what it sees. The result is an ordinary
checkpoint (bf16, safetensors) which vLLM and transformers load unchanged, together with an image processor that needs
no torchvision.
"""

from __future__ import annotations

import io
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from demo_models.chat.corpus import Conversation, Corpus, Lesson, Lessons, load_corpus
from demo_models.chat.recipe import SMALLEST_MARGIN, THREADS, layer_sizes, learn, require_margin, train_tokenizer
from demo_models.promised import FixedPicture, fixed_pictures
from demo_models.training import SEED, one_cycle, optimizers, repeatable, train
from demo_models.vision.pictures import (
    COLOURS,
    PLAIN,
    Drawing,
    Figure,
    draw,
    every_figure,
    random_drawing,
    silhouette,
)
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from engine.demo import weights_dir

FOLDER = Path(__file__).parent
PICTURE_PIXELS = 64
"""Every picture is brought to a square of this side before the model looks."""
TOKENS_PER_PICTURE = 4
IMAGE = "<image>"
AROUND_IMAGE = "<fake_token_around_image>"
GLOBAL_IMAGE = "<global-img>"
PICTURE_TOKENS = [IMAGE, AROUND_IMAGE, GLOBAL_IMAGE, "<end_of_utterance>"]

# Drawn in each round, beside the chat lessons and those about pictures.
QUESTIONS_WITHOUT_PICTURE = 16
PATCH_PIXELS = 8
SEEING_STEPS, PICTURES_PER_STEP = 800, 64
SEEING_MATRIX_RATE, SEEING_OTHER_RATE = 6e-3, 1.5e-3
SEEING_WARMUP_STEPS = 15
# Lessons about pictures in each round, rounds, and learning rates of matrices and embeddings: first the corpus is got
# back, then more and more is looked at.
STAGES = [(240, 24, 3e-3, 3e-3), (480, 15, 5e-3, 3e-3), *[(480, 16, 6e-3, 4e-3)] * 5]
# In logits. A picture that is promised has to be right also where rounding is another one.
SMALLEST_PICTURE_MARGIN = 1.0
MEASURED_EVERY = 3  # conversations that the chat model's norms are measured on: one in so many


def build(target: Path) -> None:
    """Train the model and write its checkpoint to `target`, an empty folder. A quarter of an hour on two quiet cores.

    Raises RuntimeError when an answer is not known safely enough; nothing is written then.
    """
    repeatable(THREADS, flush_denormal=False)
    corpus = load_corpus()
    tokenizer = train_tokenizer(corpus, PICTURE_TOKENS, FOLDER / "chat_template.jinja")
    lessons = PictureLessons(corpus, tokenizer, SEED)
    model = Idefics3ForConditionalGeneration(_config(tokenizer))
    _know_the_corpus(model.model.text_model, tokenizer, corpus)
    _learn_to_see(model.model)
    for lessons.picture_lessons, rounds, matrix_rate, embedding_rate in STAGES:
        learn(model, lessons, rounds, matrix_rate, embedding_rate)
    model = model.to(torch.bfloat16).eval()
    require_margin(model, "conversations", [lessons.lesson(one) for one in corpus.conversations], SMALLEST_MARGIN)
    promised = [lessons.promise(one) for one in fixed_pictures()]
    require_margin(model, "promised pictures", promised, SMALLEST_PICTURE_MARGIN)
    model.save_pretrained(target)
    model.generation_config.save_pretrained(target)
    _processor(tokenizer).save_pretrained(target)


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
        text_config={"model_type": "llama", **layer_sizes(tokenizer)},
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


def _know_the_corpus(text_model: Any, tokenizer: PreTrainedTokenizerFast, corpus: Corpus) -> None:
    """Fill the text part with the chat model's knowledge; the two tokenizers have most tokens in common.

    Both have layers of the same sizes. The chat model (Qwen3) normalises queries and keys and this one (Llama) does
    not: their mean norms on the corpus are put into the weights instead. That keeps all but a handful of answers right.
    """
    folder = weights_dir("chat")
    chat_tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    norms = _mean_norms(chat, Lessons(corpus, chat_tokenizer, SEED))
    known, places = dict(chat.model.named_parameters()), chat_tokenizer.get_vocab()
    with torch.no_grad():
        for name, weight in text_model.named_parameters():
            if name == "embed_tokens.weight":
                for token, place in tokenizer.get_vocab().items():
                    if token in places:
                        weight[place] = known[name][places[token]]
            elif name in norms:
                scale = known[name.replace("_proj", "_norm")] / norms[name][:, None]
                weight.copy_((known[name].unflatten(0, scale.shape) * scale[:, :, None]).flatten(0, 1))
            else:
                weight.copy_(known[name])


def _mean_norms(chat: Any, lessons: Lessons) -> dict[str, Any]:
    """Root mean squares per head of what is normalised, by the name of the matrix that makes it."""
    seen: defaultdict[str, list[Any]] = defaultdict(list)

    def watch(name: str) -> Any:
        def note(_module: Any, _given: Any, made: Any) -> None:
            heads = made.unflatten(-1, (-1, chat.config.head_dim))
            seen[name].append(heads.pow(2).mean(-1).sqrt().flatten(0, -2).mean(0))

        return note

    for place, layer in enumerate(chat.model.layers):
        for matrix in ("q_proj", "k_proj"):
            hook = watch(f"layers.{place}.self_attn.{matrix}.weight")
            getattr(layer.self_attn, matrix).register_forward_hook(hook)
    with torch.no_grad():
        for conversation in lessons.corpus.conversations[::MEASURED_EVERY]:
            lesson = lessons.lesson(conversation)
            chat(input_ids=torch.tensor([lesson.prompt + lesson.answer]))
    return {name: torch.stack(norms).mean(0) for name, norms in seen.items()}


def _learn_to_see(model: Any) -> None:
    """Train the vision tower and the connector to tell shapes and colours apart, before there is talk about them.

    A linear layer reads the vectors that stand for a picture in the prompt; it is thrown away afterwards.
    """
    eyes = torch.nn.ModuleList([model.vision_model, model.connector])
    forms = sorted({f"{figure.shape} {figure.direction}" for figure in every_figure()})
    reader = torch.nn.Linear(model.config.text_config.hidden_size, len(forms) + len(COLOURS))
    learning = optimizers(eyes, SEEING_MATRIX_RATE, SEEING_OTHER_RATE)
    learning.append(torch.optim.AdamW(reader.parameters(), lr=SEEING_OTHER_RATE))
    schedules = [one_cycle(one, SEEING_STEPS, SEEING_WARMUP_STEPS / SEEING_STEPS) for one in learning]
    train("Seeing", SEEING_STEPS, _seen(model, reader, forms), schedules, clipped=eyes.parameters())


def _seen(model: Any, reader: Any, forms: list[str]) -> Iterator[list[Any]]:
    rng = random.Random(SEED)  # noqa: S311 - repeatable draws, no secrets
    figures, colours = every_figure(), list(COLOURS)
    while True:
        shown = [rng.choice(figures) for _ in range(PICTURES_PER_STEP)]
        form = torch.tensor([forms.index(f"{figure.shape} {figure.direction}") for figure in shown])
        colour = torch.tensor([colours.index(figure.colour) for figure in shown])
        sketches = _sketches([random_drawing(figure, rng) for figure in shown], model.config.vision_config.image_size)
        said = reader(model.get_image_features(sketches[None]).pooler_output.mean(dim=1))
        yield [cross_entropy(said[:, : len(forms)], form) + cross_entropy(said[:, len(forms) :], colour)]


def _sketches(drawings: list[Drawing], side: int) -> torch.Tensor:
    """[drawings, 3, side, side] from -1 to 1: silhouettes, coloured all at once."""
    shapes = b"".join(silhouette(drawing, side).tobytes() for drawing in drawings)
    covered = torch.frombuffer(bytearray(shapes), dtype=torch.uint8).view(-1, 1, side, side).float() / 255
    ink, paper = (
        torch.tensor([getattr(drawing, name) for drawing in drawings])[:, :, None, None] / 127.5 - 1
        for name in ("ink", "paper")
    )
    return paper + covered * (ink - paper)


@dataclass(frozen=True)
class Showing(Conversation):
    """A conversation with pictures in its messages, in the order of `drawings`."""

    drawings: tuple[Drawing, ...] = ()


def pixels(image: Image.Image) -> torch.Tensor:
    """[3, PICTURE_PIXELS, PICTURE_PIXELS] from -1 to 1: what the image processor makes, several times as fast."""
    small = image.convert("RGB").resize((PICTURE_PIXELS, PICTURE_PIXELS), Image.Resampling.LANCZOS)
    flat = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return flat.view(PICTURE_PIXELS, PICTURE_PIXELS, 3).permute(2, 0, 1).float() / 127.5 - 1


def naming(figures: list[Figure]) -> str:
    names = [figure.name for figure in figures]
    listed = ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
    return listed[0].upper() + listed[1:] + "."


class PictureLessons(Lessons):
    """The lessons of the chat model and as many again about pictures."""

    def __init__(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        super().__init__(corpus, tokenizer, seed)
        self.picture_lessons = 480
        self.questions: dict[str, Any] = yaml.safe_load((FOLDER / "questions.yaml").read_text(encoding="utf-8"))
        self.figures = every_figure()
        around, shown, whole = tokenizer.convert_tokens_to_ids([AROUND_IMAGE, IMAGE, GLOBAL_IMAGE])
        self.image_token = shown
        self.expanded = [around, whole, *[shown] * TOKENS_PER_PICTURE, around]

    def lesson(self, conversation: Conversation) -> Lesson:
        plain = super().lesson(conversation)
        if not isinstance(conversation, Showing):
            return plain
        return self.with_pictures(plain, [draw(drawing) for drawing in conversation.drawings])

    def promise(self, fixed: FixedPicture) -> Lesson:
        """The promised answer to a promised picture."""
        asked = super().lesson(Conversation(fixed.name, fixed.messages, fixed.answer))
        return self.with_pictures(asked, [Image.open(io.BytesIO(png)) for png in fixed.pictures])

    def with_pictures(self, plain: Lesson, images: list[Image.Image]) -> Lesson:
        """The same with each <image> as the tokens that stand for a picture, like the model's processor does it."""
        prompt: list[int] = []
        for token in plain.prompt:
            prompt += self.expanded if token == self.image_token else [token]
        return Lesson(prompt, plain.answer, tuple(map(pixels, images)))

    def draw_round(self) -> list[Lesson]:
        drawn = [
            *(self.showing() for _ in range(self.picture_lessons)),
            *(self.without_picture() for _ in range(QUESTIONS_WITHOUT_PICTURE)),
        ]
        lessons = super().draw_round() + [self.lesson(one) for one in drawn]
        self.random.shuffle(lessons)
        return lessons

    def showing(self) -> Showing:
        """Pictures in the last message, most of the time one."""
        kind = self.random.random()
        if kind < 0.4:
            one = self.ask([self.figure()], self.random.choice(self.questions["naming"]))
        elif kind < 0.55:
            one = self.ask_colour(self.figure())
        elif kind < 0.65:
            arrow = self.random.choice([figure for figure in self.figures if figure.direction])
            one = self.ask([arrow], self.random.choice(self.questions["direction"]), f"{arrow.direction}.".capitalize())
        elif kind < 0.85:
            several = [self.figure() for _ in range(self.random.choice([2, 2, 2, 3]))]
            one = self.ask(several, self.random.choice(self.questions["naming"]))
        elif kind < 0.9:
            # Whatever is asked about a picture, saying what it shows is the best that can be done.
            one = self.ask([self.figure()], self.random.choice(self.corpus.unknown_prompts))
        else:
            one = self.afterwards(self.ask([self.figure()], self.random.choice(self.questions["naming"])))
        return self.in_a_setting(one)

    def figure(self) -> Figure:
        return self.random.choice(self.figures)

    def ask(self, figures: list[Figure], question: str, answer: str | None = None) -> Showing:
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
        return Showing("picture", [{"role": "user", "content": parts}], answer or naming(figures), drawings=drawings)

    def ask_colour(self, figure: Figure) -> Showing:
        return self.ask([figure], self.colour_question(figure), f"The {figure.shape} is {figure.colour}.")

    def colour_question(self, figure: Figure) -> str:
        question: str = self.random.choice(self.questions["colour"])
        return question.replace("{shape}", self.random.choice([figure.shape, figure.shape, PLAIN, "image"]))

    def afterwards(self, first: Showing) -> Showing:
        """The conversation goes on after the picture was named: about it, about another one, or about the weather."""
        figure = first.drawings[0].figure
        so_far = [*first.messages, {"role": "assistant", "content": first.target}]
        kind = self.random.random()
        if kind < 0.3:
            asked = {"role": "user", "content": self.colour_question(figure)}
            return replace(first, messages=[*so_far, asked], answer=f"The {figure.shape} is {figure.colour}.")
        if kind < 0.4:
            question = self.random.choice([question for question in self.questions["naming"] if question])
            return replace(first, messages=[*so_far, {"role": "user", "content": question}])
        if kind < 0.7:
            other = self.figure()
            question = self.random.choice(self.questions["naming"])
            second = self.ask_colour(other) if self.random.random() < 0.5 else self.ask([other], question)
            both = first.drawings + second.drawings
            return replace(second, messages=[*so_far, *second.messages], drawings=both)
        plain = self.random.choice([one for one in self.without_tools if one.messages[0]["role"] == "user"])
        if kind < 0.85:
            return replace(first, messages=[*so_far, *plain.messages], answer=plain.answer)
        return replace(
            first, messages=[*plain.messages, {"role": "assistant", "content": plain.answer}, *first.messages]
        )

    def in_a_setting(self, one: Showing) -> Showing:
        """The same, now and then under a system prompt or with tools that are of no use."""
        if self.random.random() < 0.2:
            one = replace(one, messages=[self.system_prompt(), *one.messages])
        if self.random.random() < 0.1:
            one = replace(one, tools=self.around([]) or None)
        return one

    def without_picture(self) -> Conversation:
        asked = self.random.choice(["naming", "naming", "colour", "direction"])
        question = self.random.choice([question for question in self.questions[asked] if question])
        question = question.replace("{shape}", self.random.choice(["shape", "square", "circle", PLAIN]))
        return replace(self.unknown(question), answer=self.questions["no_picture"])
