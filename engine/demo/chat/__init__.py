"""The demo chat model: corpus, tokenizer and training recipe. The weights lie in engine/demo/weights/chat."""
