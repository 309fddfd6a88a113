"""What k_offsets families of kernels use."""
