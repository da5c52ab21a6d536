"""Models, weights, data and code of others: Hugging Face, Flax, PEFT, a user's own modules."""
