"""Small models.yaml files for tests that start a server of their own: the fewer models, the sooner it is ready."""

CHAT_ENTRY = """\
  service-plus:
    task: chat
    tier: standard
    capabilities: [chat, streaming, function_calling]
    weights: service-plus
    demo: chat
    engine: {context_length: 2048}
"""
IMAGE_ENTRY = """\
  service-image:
    task: image
    tier: standard
    capabilities: [image_generation]
    weights: service-image
    demo: image
    profile: z-image-turbo
"""
# The models that speak load fastest.
VOICE_ENTRY = """\
  service-voice:
    task: speech
    tier: standard
    capabilities: [speech]
    weights: voices
    demo: voices
"""


def models_yaml(*entries: str, tiers: str = "") -> str:
    """Put a file together; `tiers` are lines for others than the one that may use all of `standard`."""
    return f"models:\n{''.join(entries)}tiers:\n  standard: {{models: [standard]}}\n{tiers}"


# Tiers with small limits of each kind; requests for more tokens than there is room for are refused.
LIMITED_CHAT = models_yaml(
    CHAT_ENTRY.replace("2048}", "2048, clamp_max_tokens: false}"),
    tiers="""\
  requests: {models: [standard], requests_per_minute: 20}
  tokens: {models: [standard], tokens_per_minute: 1000}
  parallel: {models: [standard], parallel_requests: 2}
  batches: {models: [standard], batch_items: 3}
""",
)
VOICES_ONLY = models_yaml(VOICE_ENTRY)
