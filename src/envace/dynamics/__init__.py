"""How a policy changes while it is trained: every exported model, evaluated."""
