"""The embedded world: a service desk with tools, tasks, an executable environment, a tokenizer and a tiny model."""
