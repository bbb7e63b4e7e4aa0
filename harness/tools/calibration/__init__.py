"""What is measured on a model once, over many images, and stored with its key: positional priors, FitPrune's scheme."""
