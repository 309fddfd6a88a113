"""The commands that ao-hf adds to `ao`: generate, bench and eval."""
