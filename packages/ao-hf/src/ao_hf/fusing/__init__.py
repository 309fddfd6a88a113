"""Decoder blocks of transformers in few ops; see `ao_hf.fuse`."""
