"""The models: one decoder with its weights, and Hugging Face directories to read and write."""
