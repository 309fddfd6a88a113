"""Plugins that let serving engines read folders that ao wrote: `vllm` and `sglang`.

They are written against the published interfaces of the engines and tested with stubs of these. They were not
run in the engines.
"""
