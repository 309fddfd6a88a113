"""A vision transformer for handwritten digits: scikit-learn's 1,797 images of 8 × 8 pixels."""
