"""An OpenAI-compatible chat-completions endpoint with private rehearsal inside; see docs/serve.md."""
