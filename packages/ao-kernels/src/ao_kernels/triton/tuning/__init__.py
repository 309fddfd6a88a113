"""Which of a few settings a kernel is launched with: by rule, as shipped, as kept on disk, or as measured."""
