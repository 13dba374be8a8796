"""The engine's HTTP front: OpenAI routes, tokenizer, chat template, text of tokens, the core process. No torch."""
