"""`python -m ao_kernels.tune`: measured settings of kernels, to see, to drop, to make ahead and to pass on.

No command of `ao`, which would have to import every kernel before it could list its commands.
"""
