"""Five trained models, by which the advice of `plan`, `autoquant` and `recommend` is judged."""
