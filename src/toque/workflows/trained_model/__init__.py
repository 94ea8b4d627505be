"""A trained model: its folder, the record of its training, its tokenizer and its prompts."""
