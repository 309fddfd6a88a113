"""The parts of the byte-level language model: data, model, training, measures and tables."""
