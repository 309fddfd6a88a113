"""The commands that ao-hf adds to `ao`: generate, bench, eval and recommend."""
