//! One decoder for sampling, training and scoring, with its Hugging Face files.
