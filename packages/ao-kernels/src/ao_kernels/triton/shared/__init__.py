"""What several families of kernels use."""
