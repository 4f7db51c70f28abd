"""The demo vision model: pictures, questions and training recipe. The weights lie in engine/demo/weights/vision."""
