"""One step of Adam with 8-bit moments."""
