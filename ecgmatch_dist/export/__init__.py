"""A model without this package: weights, settings, a card, and an ONNX graph that takes the raw signal (docs/predict.md)."""
