"""Makes the demo image model: it paints the shape and colour that it is asked for.

First the autoencoder is trained, then the text encoder, which learns to read (looking for words while learning to
paint takes far longer than both lessons one after the other), then the transformer, by flow matching in the space of
the latents. The result is an ordinary folder of diffusers (bf16, safetensors), loaded by
`DiffusionPipeline.from_pretrained` without any code of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_models.image.pictures import COLOURS, PHRASES, SENTENCES, Circle, Scene, draw, random_circle, random_prompt
from demo_models.training import SEED, optimizers, plateau, repeatable, train
from demo_models.vision.pictures import SHAPES, pixels
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy, rms_norm
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

SIDE_PIXELS = 256

# Of the autoencoder: steps, edge in pixels of the window that is looked at, windows in a step.
STAGES = [(900, 64, 12), (80, 256, 2)]

# Part of the steps, prompts in a step, longest unrelated text in characters.
READ = [(0.55, 64, 0), (0.30, 32, 150), (0.15, 8, 1000)]
LAST_TOKENS = 5
"""Of the chat template, after the prompt: what was read has to be in each of them."""
QUESTIONS: list[list[Any]] = [list(COLOURS), SHAPES, [None, *COLOURS]]

# Shapes differ little in their place and a good deal in their size: what a model this small still paints cleanly.
PICTURES = 4000
SMALLEST_DIAMETER, LARGEST_DIAMETER = 0.5, 0.74
WANDERING = 0.09
"""How far apart the centres of shapes stand at most, in parts of the picture."""

# Of the transformer: steps, learning rates of matrices and of the rest, and for which part of the steps they stay
# before they fall. The second course makes the edges clean.
COURSES = [(2200, 5e-3, 4e-3, 0.3), (1600, 4e-3, 3e-3, 0.1)]
# Part of the steps, pictures in a step, longest unrelated text in characters.
PAINTED = [(0.85, 28, 0), (0.11, 20, 120), (0.04, 8, 1000)]
# Where noise is much, shape and place are decided: the training looks there more often than the steps do.
TRAINING_SHIFT = 5.0

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTEXT_TOKENS = 4096

LATENT_CHANNELS = 12
WORD_FEATURES = 64
# Two channels carry a constant through all layers. Without them the group norms would scale a picture of one colour
# like a picture of another, and its colour were lost.
CONSTANT = 3.0
FIRST = 2

Read = Callable[[list[str]], list[Any]]
"""What the pipeline makes of prompts: for each a tensor [tokens, features]."""


def build(target: Path) -> None:
    """Train the pipeline and write it to `target`, an empty folder. A third of an hour on a quiet core."""
    repeatable(1, flush_denormal=True)  # layers this small gain nothing by two threads
    tokenizer = train_tokenizer(SEED)
    # Each part starts from the seed, so that it does not depend on how long another one was trained.
    torch.manual_seed(SEED)
    autoencoder = new_autoencoder()
    steps = sum(stage[0] for stage in STAGES)
    _learn("Autoencoder", autoencoder, steps, (3e-3, 3e-3, 0.45), _blurred(autoencoder))
    album = _album(autoencoder)
    torch.manual_seed(SEED)
    text_encoder = new_text_encoder(tokenizer)
    read = partial(_features, text_encoder, tokenizer)
    answers = torch.nn.Linear(WORD_FEATURES, sum(map(len, QUESTIONS)))
    both = torch.nn.ModuleDict({"reader": text_encoder, "answers_embed": answers})
    _learn("Reading", both, 2000, (4e-3, 4e-3, 0.45), _misread(read, answers))
    torch.manual_seed(SEED)
    transformer = new_transformer()
    for number, (steps, *rates) in enumerate(COURSES):
        _learn("Painting", transformer, steps, rates, _mispainted(transformer, read, album, SEED + number))
    # As in the model it is modelled on: most of the steps go where place and shape are decided.
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipeline = ZImagePipeline(scheduler, autoencoder, text_encoder, tokenizer, transformer)
    pipeline.to(torch.bfloat16).save_pretrained(target, safe_serialization=True)
    # Let transformers load the text encoder as diffusers loads the other parts, whatever the type in the file.
    config = target / "text_encoder" / "config.json"
    values = {**json.loads(config.read_text("utf-8")), "dtype": "float32"}
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _learn(about: str, model: Any, steps: int, rates: Any, losses: Iterator[list[Any]]) -> None:
    """Train in place. `rates` are those of matrices and of the rest, and the share of steps before they fall."""
    *learning_rates, steady_share = rates
    schedules = [plateau(one, steps, steady_share) for one in optimizers(model, *learning_rates)]
    train(about, steps, losses, schedules, clipped=model.parameters())


def _features(model: Any, tokenizer: Qwen2Tokenizer, prompts: list[str]) -> list[Any]:
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        for prompt in prompts
    ]
    asked = tokenizer(texts, padding=True, return_tensors="pt")
    mask = asked.attention_mask.bool()
    made = model(input_ids=asked.input_ids, attention_mask=mask, output_hidden_states=True).hidden_states[-2]
    return [made[row][mask[row]] for row in range(len(prompts))]


def _random_scene(rng: random.Random) -> Scene:
    """Any shape in any colour; on white mostly, else on another colour."""
    colour, paper = rng.choice(list(COLOURS)), None
    if rng.random() < 0.2:
        paper = rng.choice([name for name in COLOURS if name != colour])
    return Scene(rng.choice(SHAPES), colour, random_circle(rng), paper)


def _random_prompt_for(rng: random.Random, scene: Scene, characters: int) -> str:
    """A prompt for this scene, with unrelated text up to so many characters."""
    return random_prompt(rng, scene.shape, scene.colour, scene.paper, rng.randint(characters // 3, characters))


def _blurred(model: Any) -> Iterator[list[Any]]:
    rng = random.Random(SEED)  # noqa: S311 - repeatable draws, no secrets
    for steps, window, batch in STAGES:
        for _ in range(steps):
            seen = torch.from_numpy(np.stack([_view(rng, window) for _ in range(batch)]))
            posterior = model.encode(seen).latent_dist
            error = (model.decode(posterior.sample()).sample - seen).abs()
            kl = (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean() / 2
            yield [error.mean() + error.square().mean() + 5e-4 * kl]


def _view(rng: random.Random, window: int) -> Any:
    """A picture, or a part of it that is likely to contain an edge."""
    scene = _random_scene(rng)
    around = scene.around
    angle = rng.uniform(0, 2 * np.pi)
    reach = around.radius * rng.uniform(0.2, 1.0)
    left, top = (
        min(SIDE_PIXELS - window, max(0, round(middle * SIDE_PIXELS - window * rng.uniform(0.3, 0.7))))
        for middle in (around.x + reach * np.cos(angle), around.y + reach * np.sin(angle))
    )
    return pixels(draw(scene, SIDE_PIXELS, (left, top, window)))


def _album(autoencoder: Any) -> tuple[list[Scene], Any, Any]:
    """What the pictures show, their layouts, and their latents [pictures, channels, height, width].

    Layouts [pictures, 3] say how far to the right, how far down and how big each shape is, from 0 to 1. The latents are
    scaled to mean 0 and deviation 1, and the autoencoder's config says how.
    """
    rng = random.Random(SEED)  # noqa: S311 - repeatable draws, no secrets
    layouts = [(rng.random(), rng.random(), rng.random()) for _ in range(PICTURES)]
    scenes = [replace(_random_scene(rng), around=_circle(*layout)) for layout in layouts]
    found = []
    with torch.no_grad():
        for first in range(0, PICTURES, 8):
            seen = np.stack([pixels(draw(scene, SIDE_PIXELS)) for scene in scenes[first : first + 8]])
            found.append(autoencoder.encode(torch.from_numpy(seen)).latent_dist.mean)
    latents = torch.cat(found)
    shift, deviation = latents.mean().item(), latents.std().item()
    autoencoder.register_to_config(scaling_factor=1 / deviation, shift_factor=shift)
    return scenes, torch.tensor(layouts), (latents - shift) / deviation


def _circle(across: float, down: float, size: float) -> Circle:
    diameter = SMALLEST_DIAMETER + (LARGEST_DIAMETER - SMALLEST_DIAMETER) * size
    return Circle(0.5 + WANDERING * (across - 0.5), 0.5 + WANDERING * (down - 0.5), diameter / 2)


def _misread(read: Read, answers: Any) -> Iterator[list[Any]]:
    """Colour, shape and background have to be known at a prompt's end."""
    rng = random.Random(SEED)  # noqa: S311 - repeatable draws, no secrets
    while True:
        _, count, characters = rng.choices(READ, [kind[0] for kind in READ])[0]
        scenes = [_random_scene(rng) for _ in range(count)]
        prompts = [_random_prompt_for(rng, one, characters) for one in scenes]
        ends = torch.stack([one[-LAST_TOKENS:] for one in read(prompts)])
        logits = answers(rms_norm(ends, ends.shape[-1:])).split([len(known) for known in QUESTIONS], dim=-1)
        loss = 0
        for known, about, said in zip(QUESTIONS, ("colour", "shape", "paper"), logits, strict=True):
            wanted = torch.tensor([known.index(getattr(one, about)) for one in scenes])
            loss = loss + cross_entropy(said.flatten(0, 1), wanted.repeat_interleave(LAST_TOKENS))
        yield [loss]


def _mispainted(transformer: Any, read: Read, album: tuple[list[Scene], Any, Any], seed: int) -> Iterator[list[Any]]:
    scenes, all_layouts, all_latents = album
    rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
    noise_rng = torch.Generator().manual_seed(seed)
    while True:
        _, count, characters = rng.choices(PAINTED, [kind[0] for kind in PAINTED])[0]
        chosen = rng.sample(range(len(scenes)), count)
        prompts = [_random_prompt_for(rng, scenes[number], characters) for number in chosen]
        with torch.no_grad():
            features = read(prompts)
        latents = all_latents[chosen]
        noise = _agreeing_noise(latents.shape, all_layouts[chosen], noise_rng)
        even = (torch.arange(count) + torch.rand(count, generator=noise_rng)) / count
        even[torch.rand(count, generator=noise_rng) < 0.12] = 1.0
        sigma = TRAINING_SHIFT * even / (1 + (TRAINING_SHIFT - 1) * even)
        noisy = torch.lerp(latents, noise, sigma[:, None, None, None])
        painted = transformer(list(noisy[:, :, None].unbind()), 1 - sigma, features, return_dict=False)[0]
        # Times its square, an error in the flow is an error in the picture: grain in what is nearly done costs little.
        error = (torch.stack(painted)[:, :, 0] - (latents - noise)).square().mean(dim=(1, 2, 3))
        yield [(error * sigma.square()).mean()]


def _agreeing_noise(shape: Any, layouts: Any, rng: Any) -> Any:
    """Gaussian noise whose first three channels have means that are tied to the layouts: place and size of the shape.

    Over all pictures it is still plain Gaussian noise, and few steps suffice to paint it.
    """
    noise = torch.randn(shape, generator=rng)
    wanted = torch.special.ndtri(layouts.clamp(1e-3, 1 - 1e-3)) / (shape[2] * shape[3]) ** 0.5
    noise[:, :3] += (wanted - noise[:, :3].mean(dim=(2, 3)))[:, :, None, None]
    return noise


def train_tokenizer(seed: int) -> Qwen2Tokenizer:
    """A small Qwen2 one, byte-level, in which colours and shapes are whole words; any text survives the round trip."""
    empty = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = empty.normalizer, empty.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=1400,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(seed), trainer)
    learned: dict[str, Any] = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token=CONTROL_TOKENS[2],
        additional_special_tokens=CONTROL_TOKENS[1:2],
        model_max_length=CONTEXT_TOKENS,
    )
    tokenizer.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text("utf-8")
    return tokenizer


def _texts(seed: int) -> Iterator[str]:
    rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
    yield from ["user assistant"] * 2000
    for word in [*COLOURS, *SHAPES]:
        yield from [f"{word} {word} {word.upper()} {word.capitalize()} {word.upper()} {word.capitalize()}"] * 400
    yield from chain(*PHRASES.values(), SENTENCES)
    for _ in range(300):
        yield random_prompt(rng, rng.choice(SHAPES), rng.choice(list(COLOURS)), None, rng.randint(0, 1100))


def new_autoencoder() -> Any:
    model = AutoencoderKL(
        latent_channels=LATENT_CHANNELS,
        down_block_types=("DownEncoderBlock2D",) * 5,
        up_block_types=("UpDecoderBlock2D",) * 5,
        block_out_channels=(8, 16, 32, 48, 64),
        norm_num_groups=1,
        sample_size=256,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    _start_as_a_blur(model)
    return model


def _start_as_a_blur(model: Any) -> None:
    """Set the weights in place: every layer outside the residuals passes its channels on, and averages going down."""
    with torch.no_grad():
        for name, layer in model.named_modules():
            if name.endswith(".conv2"):
                layer.weight.zero_()
            elif isinstance(layer, torch.nn.Conv2d) and not name.endswith(".conv1"):
                layer.weight *= 0.3
                layer.bias.zero_()
                _pass_on(name, layer)
                if not name.endswith("conv_out"):
                    layer.weight[:FIRST] = 0
                    layer.bias[0], layer.bias[1] = CONSTANT, -CONSTANT
        model.encoder.conv_out.weight[LATENT_CHANNELS:] = 0
        model.encoder.conv_out.bias[LATENT_CHANNELS:] = -4.6


def _pass_on(name: str, layer: Any) -> None:
    outputs, inputs, side, _ = layer.weight.shape
    into, gain = (0, 2.0) if name.endswith("conv_out") else (FIRST, 1.0)
    out_of = 0 if name.endswith("conv_in") else FIRST
    number = torch.arange(min(outputs - into, inputs - out_of))
    if "downsamplers" in name:
        layer.weight[into + number, out_of + number, :2, :2] += gain / 4
    else:
        layer.weight[into + number, out_of + number, side // 2, side // 2] += gain


def new_text_encoder(tokenizer: Qwen2Tokenizer) -> Any:
    """The pipeline takes what comes out of the last layer but one, as it does with the big one."""
    return Qwen3Model(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=WORD_FEATURES,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=CONTEXT_TOKENS,
            initializer_range=0.05,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def new_transformer() -> Any:
    return ZImageTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        dim=96,
        n_layers=4,
        n_refiner_layers=1,
        n_heads=3,
        n_kv_heads=3,
        cap_feat_dim=WORD_FEATURES,
        axes_dims=[8, 12, 12],
        axes_lens=[CONTEXT_TOKENS + 64, 64, 64],
    )
